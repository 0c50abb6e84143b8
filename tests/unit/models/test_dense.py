"""Decoders: their units cover what is built, on any tensor-parallel size."""

import pytest
import torch
from megatron.core.transformer.mlp import MLP

from models.blocks.activation import squared_relu
from models.config import ModelConfig
from models.families import FAMILIES
from models.units import Unit, check_coverage
from parallel.comm.groups import Groups
from tests.families import SETTINGS, tiny_model
from tests.models import built, initialized

MODELS = {
    **{name: tiny_model(name) for name in FAMILIES},
    "gpt with query-key norms": tiny_model("gpt", qk_norm=True),
    "gpt with a gate": tiny_model("gpt", activation="geglu"),
    "deepseek without query latent": tiny_model(
        "deepseek", latent={**SETTINGS["deepseek"]["latent"], "query_rank": None}
    ),
}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


def units_of(model: ModelConfig, rank: int = 0, size: int = 1, **options: object) -> list[Unit]:
    """Units of all layers on one tensor-parallel rank."""
    return FAMILIES[model.family].units(
        model, layers=range(model.layers), tensor_rank=rank, tensor_size=size, **options
    )


@EVERY_MODEL
def test_the_units_are_what_is_built(name: str, world: Groups) -> None:
    model = MODELS[name]
    parameters = built(model)[1]
    for qkv_units in ("head", "group", "component", "fused"):
        for split in (True, False):
            units = units_of(model, qkv_units=qkv_units, split_gate_up=split)
            check_coverage(units, parameters)
            assert sum(u.numel for u in units) == sum(p.numel() for p in parameters.values())


@EVERY_MODEL
def test_initial_weights_do_not_depend_on_tensor_parallelism(name: str) -> None:
    model = MODELS[name]
    units, parameters = initialized(model)
    whole = {u.name: u.view(parameters[u.parameter]).reshape(u.shape) for u in units}
    seen = set()
    for rank in range(2):
        local_units, local = initialized(model, (rank, 2))
        check_coverage(local_units, local)
        for unit in local_units:
            piece = unit.piece(whole[unit.name], rank, 2)
            assert torch.equal(unit.view(local[unit.parameter]), piece), unit.name
            seen.add(unit.name)
    assert seen == whole.keys()


@EVERY_MODEL
def test_initial_norms_are_the_radius(name: str) -> None:
    units, parameters = initialized(MODELS[name])
    for unit in units:
        if unit.is_matrix and unit.role not in ("embedding", "head"):
            whole = unit.view(parameters[unit.parameter]).reshape(unit.shape)
            rows, cols = unit.shape
            # The draw and its rescaling are float32.
            norm = torch.linalg.svdvals(whole)[0].item()
            assert norm == pytest.approx((rows / cols) ** 0.5, rel=1e-5), unit.name


@EVERY_MODEL
def test_gains_of_heads_are_sums_over_tensor_ranks(name: str) -> None:
    model = MODELS[name]
    units = units_of(model, 1, 2)
    partial = {u.name for u in units if u.partial_over_tensor}
    layers = range(model.layers) if model.qk_norm else ()
    assert partial == {
        f"layers.{layer}.attention.{gain}" for layer in layers for gain in ("q_norm", "k_norm")
    }
    for unit in units:
        if unit.name in partial:
            assert (unit.role, unit.shape, unit.replicated) == ("gain", (12,), True)


def test_latent_attention_has_the_units_of_its_parts() -> None:
    """Matrices into latents are whole on every rank, those out of latents are cut by heads."""
    shapes = {
        unit.name.removeprefix("layers.1."): unit.shape
        for unit in units_of(MODELS["deepseek"], 1, 2)
        if unit.name.startswith("layers.1.")
    }
    assert shapes["q_a"] == (20, 32) and shapes["kv_a"] == (14 + 6, 32)
    assert shapes["attention.q_a_norm"] == (20,) and shapes["attention.kv_a_norm"] == (14,)
    assert [name for name in shapes if name.startswith("q_b.")] == ["q_b.2", "q_b.3"]
    assert (
        shapes["q_b.3"] == (14, 20) and shapes["k_b.3"] == (8, 14) and shapes["v_b.3"] == (10, 14)
    )
    assert shapes["o"] == (32, 40)
    direct = units_of(MODELS["deepseek without query latent"])
    assert {u.shape for u in direct if u.role == "q"} == {(14, 32)}
    with pytest.raises(ValueError, match="qkv_units must be one of head, .*, got 'row'"):
        units_of(MODELS["deepseek"], qkv_units="row")


def test_a_feed_forward_block_without_a_gate(world: Groups) -> None:
    """down relu(up x)^2, from the declared parameters."""
    model = MODELS["gpt"]
    chunk, parameters = built(model)
    for parameter in parameters.values():
        torch.nn.init.normal_(parameter)
    (block,) = (m for n, m in chunk.named_modules() if n == "decoder.layers.1.mlp")
    assert isinstance(block, MLP)
    x = torch.randn(3, 2, 32, dtype=torch.float64)
    up, down = parameters["layers.1.mlp.up"], parameters["layers.1.mlp.down"]
    expected = (x @ up.T).clamp(min=0) ** 2 @ down.T
    torch.testing.assert_close(block(x)[0], expected, rtol=1e-12, atol=1e-12)


def test_squared_relu() -> None:
    x = torch.tensor([-2.0, 0.0, 3.0], requires_grad=True)
    y = squared_relu(x)
    y.sum().backward()
    assert y.tolist() == [0.0, 0.0, 9.0]
    assert x.grad is not None and x.grad.tolist() == [0.0, 0.0, 6.0]


def test_a_parameter_that_no_dense_family_has_is_refused(world: Groups) -> None:
    chunk = built(MODELS["llama"])[0]
    chunk.stranger = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="parameter stranger is not one"):
        FAMILIES["llama"].parameter_names(chunk, range(2))
