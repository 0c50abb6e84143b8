"""PC layers in models of other libraries, compared with singular value decompositions."""

import copy
import math

import pytest
import torch
import transformers
from torch import Tensor, nn

from spectral import Muon, PCLinear, merge_, preconditioned, split_parameters
from spectral.division import Division
from spectral.effective_weight import Preconditioner, reference
from spectral.odd_polynomial import Level, stages
from spectral.pc_layers import DividedWeight

GPT2 = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 1, "n_positions": 16}
TOKENS = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))


def effective(weight: Tensor, level: Level) -> Tensor:
    """Compute PC(W) for gamma = 1 with a singular value decomposition."""
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


@pytest.mark.parametrize("level", [1, 4, [1.5, -0.5]])
def test_a_layer_multiplies_by_the_effective_weight(level: Level) -> None:
    torch.manual_seed(0)
    layer = PCLinear(12, 20, level=level).double()
    weight = layer.parametrizations.weight.original  # type: ignore[union-attr]
    x = torch.randn(5, 12, dtype=torch.float64)
    wanted = nn.functional.linear(x, effective(weight.detach(), level), layer.bias)
    # Cold starts give the top pair to a relative 1e-6.
    torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("made", [PCLinear, nn.Linear])
def test_a_layer_made_on_the_meta_device_is_drawn_like_a_linear_layer(bias, made) -> None:
    """As with FSDP2, `reset_parameters` is called on the layer or on every module.
    `nn.Linear.reset_parameters` would draw PC(W), which is a copy."""
    with torch.device("meta"):
        layer = made(12, 20, bias)
        if made is nn.Linear:
            model = nn.ModuleDict({"up": layer})
            preconditioned(model, blocks=["up"])
    layer.to_empty(device="cpu")
    torch.manual_seed(3)
    plain = nn.Linear(12, 20, bias)
    for modules in ([layer], layer.modules()):
        for parameter in layer.parameters():
            parameter.detach().fill_(torch.nan)
        for module in modules:
            if hasattr(module, "reset_parameters"):
                torch.manual_seed(3)
                module.reset_parameters()
        own = dict(layer.named_parameters())
        assert torch.equal(own.pop("parametrizations.weight.original"), plain.weight)
        assert torch.equal(own.pop("parametrizations.weight.0.gamma"), torch.ones(1))
        assert [*own] == ["bias"] * bias
        assert not bias or torch.equal(own["bias"], plain.bias)


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
    """The merged model is an ordinary model with the same logits and the original parameter
    names."""
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


def test_what_is_no_plain_layer_of_its_own_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"blocks must be the names of layers .* got \['ffn'\]"):
        preconditioned(gpt2(), blocks=["ffn"])
    with pytest.raises(ValueError, match=r"blocks must be the names of layers .* got \['c_fx'\]"):
        preconditioned(gpt2(), blocks=["c_fc", "c_fx"])
    with pytest.raises(TypeError, match="blocks must be a collection of names, got 'c_fc'"):
        preconditioned(gpt2(), blocks="c_fc")
    for call in (preconditioned, merge_):
        with pytest.raises(TypeError, match="model must be a torch.nn.Module, got list"):
            call([gpt2()])  # type: ignore[operator]
    with pytest.raises(ValueError, match="merge_ requires a model with PC layers, got GPT2LMHead"):
        merge_(gpt2())
    model = gpt2()
    preconditioned(model, blocks=["*.mlp.*"])
    with pytest.raises(ValueError, match=r"weight of .*h.0.mlp.c_fc must not already be param"):
        preconditioned(model)
    pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    pair[2].weight = pair[1].weight
    with pytest.raises(ValueError, match="1 and 2 share a weight"):
        preconditioned(pair, blocks=["0", "1"])
    assert isinstance(pair[0].weight, nn.Parameter)  # nothing was changed
    preconditioned(pair, blocks=["0"])
    pair[1].weight = pair[0].parametrizations.weight.original  # type: ignore[union-attr, index]
    with pytest.raises(ValueError, match="0 and 1 share a weight"):
        merge_(pair)


def test_a_copy_is_merged_by_itself() -> None:
    model = nn.Sequential(PCLinear(4, 4))
    twin, x = copy.deepcopy(model), torch.randn(2, 4)
    before = model(x)
    merge_(twin)
    assert isinstance(twin[0].weight, nn.Parameter)
    assert torch.equal(model(x), before) and torch.equal(twin(x), before)
    merge_(model)
    assert torch.equal(model(x), before)


def test_every_matrix_of_a_weight_has_its_own_gamma() -> None:
    """In the weight, matrices of two shapes alternate."""
    weight, layer = torch.randn(10, 6, dtype=torch.float64), Preconditioner(level=2)
    divided = DividedWeight(weight, Division(rows=(3, 2)), layer)
    gammas = [1.0, -2.0, 3.0, 0.5]
    divided.gamma.data.copy_(torch.tensor(gammas))
    effective = divided(weight).split([3, 2, 3, 2])
    for found, part, gamma in zip(effective, weight.split([3, 2, 3, 2]), gammas, strict=True):
        # The singular pair of a cold start is accurate to about 1e-9.
        torch.testing.assert_close(found, reference(layer, part, gamma), rtol=0, atol=1e-7)


def test_a_state_of_another_level_is_refused() -> None:
    saved = PCLinear(4, 4, level=4).bfloat16().state_dict()
    PCLinear(4, 4).load_state_dict({name: value.bfloat16() for name, value in saved.items()})
    with pytest.raises(ValueError, match="of level 3 cannot load a state with the coefficients"):
        PCLinear(4, 4, level=3).load_state_dict(saved)
    saved = PCLinear(4, 4, level=[1.5, -0.5]).state_dict()
    for level in ([1.6, -0.6], [1.5, -0.4], [1.5]):
        with pytest.raises(
            ValueError, match=r"with the coefficients \[1.5, -0.5\], which differ from \["
        ):
            PCLinear(4, 4, level=level).load_state_dict(saved)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_coefficients_must_be_finite(value: float) -> None:
    with pytest.raises(ValueError, match="the coefficients in level must be finite, got "):
        PCLinear(4, 4, level=[1.0, value])


def test_a_layer_that_is_refused_leaves_the_others_as_they_are() -> None:
    model = nn.ModuleDict({"plain": nn.Linear(4, 4), "W_pack": nn.Linear(4, 12)})
    with pytest.raises(
        ValueError, match=r"^W_pack.weight: looks like several .*; leave W_pack out"
    ):
        preconditioned(model, blocks=["*"])
    assert [name for name, _ in model.named_parameters()][0] == "plain.weight"
