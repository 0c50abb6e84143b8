"""PC layers in other people's models, against singular value decompositions."""

import pytest
import torch
import transformers
from torch import Tensor, nn

from spectral import AdamW, Muon, PCLinear, merge_, preconditioned, split_parameters
from spectral.odd_polynomial import stages

GPT2 = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 1, "n_positions": 16}
TOKENS = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))


def effective(weight: Tensor, level: int) -> Tensor:
    """PC(W) with gamma 1 by a singular value decomposition."""
    u, sigma, v = torch.linalg.svd(weight, full_matrices=False)
    x = sigma / (sigma[0] + 1e-7)
    for stage in stages(level):
        x = sum(c * x ** (2 * i + 1) for i, c in enumerate(stage))
    return u @ torch.diag(x * sigma[0]) @ v


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **ends))
    return model.double().eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("level", [1, 4])
def test_a_layer_multiplies_by_the_effective_weight(level: int) -> None:
    torch.manual_seed(0)
    layer = PCLinear(12, 20, level=level).double()
    weight = layer.parametrizations.weight.original  # type: ignore[union-attr]
    x = torch.randn(5, 12, dtype=torch.float64)
    wanted = nn.functional.linear(x, effective(weight.detach(), level), layer.bias)
    # The top pair is known to a relative 1e-6: cold starts stop there.
    torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-7)


def test_each_matrix_of_a_fused_and_transposed_weight_by_itself() -> None:
    model = gpt2()
    name = "transformer.h.0.attn.c_attn"
    start = model.get_parameter(f"{name}.weight").detach().clone()
    assert preconditioned(model, blocks=["c_attn"], level=2) == [name]
    now = model.get_submodule(name).weight
    assert isinstance(now, Tensor)
    for before, after in zip(start.T.split(8), now.T.split(8), strict=True):
        torch.testing.assert_close(after, effective(before, 2), rtol=1e-5, atol=1e-7)
    (gamma,) = (p for n, p in model.named_parameters() if n.endswith("gamma"))
    assert gamma.shape == (12,)


def test_a_model_trains_and_is_merged() -> None:
    """The merged model is an ordinary one with the same logits and the names of before."""
    model = gpt2()
    names = [n for n, _ in model.named_parameters()]
    layers = preconditioned(model)
    assert layers == [f"transformer.h.0.{n}" for n in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    split = split_parameters(model)
    divided = {row.name: (row.matrices, row.matrix) for row in split.rows if row.rule != "adamw"}
    original = "parametrizations.weight.original"
    assert divided[f"transformer.h.0.mlp.c_fc.{original}"] == (1, (128, 32))
    assert sum(row.name.endswith("gamma") for row in split.rows if row.rule == "adamw") == 3
    optimizer = Muon(split, lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0]
    gammas = [p for n, p in model.named_parameters() if n.endswith("gamma")]
    assert all((p != 1).all() for p in gammas)
    with torch.no_grad():
        before = model(input_ids=TOKENS).logits
        merge_(model)
        after = model(input_ids=TOKENS).logits
    assert sorted(n for n, _ in model.named_parameters()) == sorted(names)
    assert torch.equal(before, after)


def test_what_names_no_layer_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"blocks names no layer .* got \['ffn'\]"):
        preconditioned(gpt2(), blocks=["ffn"])
    model = gpt2()
    preconditioned(model, blocks=["*.mlp.*"])
    with pytest.raises(ValueError, match="names no layer"):
        preconditioned(model, blocks=["*.mlp.*"])


def test_adamw_trains_16_bit_pc_layers() -> None:
    torch.manual_seed(0)
    layer = PCLinear(16, 16).bfloat16()
    optimizer = AdamW(split_parameters(layer), master_weights=True)
    layer(torch.randn(4, 16).bfloat16()).square().sum().backward()
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in layer.parameters())
