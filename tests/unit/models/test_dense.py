"""What single families of decoders have: latent attention, a block without a gate."""

import pytest
import torch
from megatron.core.transformer.mlp import MLP

from models.families import FAMILIES
from models.size import all_units
from parallel.comm.groups import Groups
from tests.families import SETTINGS, tiny_model
from tests.models import built


def test_latent_attention_has_the_units_of_its_parts() -> None:
    """Matrices into latents are whole on every rank, those out of latents are cut by heads."""
    model = tiny_model("deepseek")
    shapes = {
        unit.name.removeprefix("layers.1."): unit.shape
        for unit in all_units(model, tensor_rank=1, tensor_size=2)
        if unit.name.startswith("layers.1.")
    }
    assert shapes["q_a"] == (20, 32) and shapes["kv_a"] == (14 + 6, 32)
    assert shapes["attention.q_a_norm"] == (20,) and shapes["attention.kv_a_norm"] == (14,)
    assert [name for name in shapes if name.startswith("q_b.")] == ["q_b.2", "q_b.3"]
    assert (
        shapes["q_b.3"] == (14, 20) and shapes["k_b.3"] == (8, 14) and shapes["v_b.3"] == (10, 14)
    )
    assert shapes["o"] == (32, 40)
    latent = {**SETTINGS["deepseek"]["latent"], "query_rank": None}
    direct = all_units(tiny_model("deepseek", latent=latent))
    assert {u.shape for u in direct if u.role == "q"} == {(14, 32)}
    with pytest.raises(ValueError, match="qkv_units must be one of"):
        all_units(model, qkv_units="row")


def test_a_feed_forward_block_without_a_gate(world: Groups) -> None:
    """down relu(up x)^2, from the declared parameters."""
    chunk, parameters = built(tiny_model("gpt"))
    for parameter in parameters.values():
        torch.nn.init.normal_(parameter)
    (block,) = (m for n, m in chunk.named_modules() if n == "decoder.layers.1.mlp")
    assert isinstance(block, MLP)
    x = torch.randn(3, 2, 32, dtype=torch.float64)
    up, down = parameters["layers.1.mlp.up"], parameters["layers.1.mlp.down"]
    expected = (x @ up.T).clamp(min=0) ** 2 @ down.T
    torch.testing.assert_close(block(x)[0], expected, rtol=1e-12, atol=1e-12)


def test_a_parameter_that_no_dense_family_has_is_refused(world: Groups) -> None:
    chunk = built(tiny_model("llama"))[0]
    chunk.stranger = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="parameter stranger is not one"):
        FAMILIES["llama"].parameter_names(chunk, range(2))
