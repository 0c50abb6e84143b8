"""The matrices that `split_parameters` finds in single layers, and the errors that it raises."""

import warnings
from collections import UserList
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spectral import AdamW, Muon, SpectralSphere, split_parameters
from spectral.division import Division
from tests.modules import module


def fused(weight: Tensor, name: str = "Wqkv") -> Any:
    """Return a module of one linear layer."""
    layer = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(weight)
    return module(**{name: layer})


FUSED = "Wqkv in_proj w13 gate_up c_attn qkv_proj W_pack kv to_kv w_gu gateup key_value ffn_in_glu"


@pytest.mark.parametrize("name", [*FUSED.split(), "v_gate"])
def test_an_unknown_fused_weight_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.weight: looks like several matrices"):
        split_parameters(fused(torch.randn(12, 4), name))


@pytest.mark.parametrize(
    ("outputs", "back", "fused"), [(16, 8, True), (24, 8, True), (8, 8, False)]
)
def test_what_a_sibling_takes_in_parts_is_fused(outputs: int, back: int, fused: bool) -> None:
    """The name does not matter: the gated layer `Wi` in ModernBERT is fused, while the plain layer
    `wi` in T5 is not."""
    back_layer = nn.Sequential(nn.Linear(back, 6), nn.Dropout())
    block = nn.ModuleDict({"wi": nn.Linear(6, outputs), "wo": back_layer, "end": nn.Linear(6, 3)})
    if not fused:
        rows = {row.name: row for row in split_parameters(block).rows}
        assert rows["wi.weight"].matrices == rows["wo.0.weight"].matrices == 1
        return
    with pytest.raises(ValueError, match="wi.weight: looks like .*uses its"):
        split_parameters(block)
    end = block.pop("end")
    block.update({"next": nn.Linear(outputs, 6), "end": end})  # `next` uses all outputs
    split_parameters(block)


def test_gains_and_biases_of_two_dimensions_are_no_matrices() -> None:
    weighed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    bare = "gain 1x6, A_log 6x4, relative_position_bias_table 9x4"
    model = module(bare, norm=nn.LayerNorm((2, 3)), linear=weighed, gate=nn.Linear(6, 1))
    split = split_parameters(model)
    matrices = [row.name for row in split.rows if row.rule != "adamw"]
    assert matrices == ["linear.parametrizations.weight.original1"]
    assert {g["weight_decay"] for g in split if "rule" in g} == {0.0}
    assert len(split_parameters(model, units={"A_log": {}}).matrices) == 2


def test_attention_of_other_keys_is_divided_by_heads() -> None:
    model = module(m=nn.MultiheadAttention(8, 2, kdim=6, vdim=4), end=nn.Linear(8, 3))
    rows = {row.name: (row.matrices, row.matrix) for row in split_parameters(model).rows}
    assert rows["m.k_proj_weight"] == (2, (4, 6)) and rows["m.v_proj_weight"] == (2, (4, 4))


def test_fewer_keys_under_the_name_of_x_transformers_are_divided_by_heads() -> None:
    attention = module("to_q 8 32, to_k 8 16, to_out 32 8", heads=4, kv_heads=2)
    model = module(m=attention, end=nn.Linear(8, 3))
    rows = {row.name: (row.matrices, row.matrix) for row in split_parameters(model).rows}
    assert rows["m.to_q.weight"] == (4, (8, 8)) and rows["m.to_k.weight"] == (2, (8, 8))


def test_keys_and_values_of_a_latent_are_apart_under_torchtitans_name() -> None:
    attention = fused(torch.randn(28, 12), "wkv_b")
    attention.qk_nope_head_dim, attention.v_head_dim = 8, 6
    (group,) = split_parameters(attention)
    assert Division.of(group["units"]).rows == (8, 6)


def test_what_nobody_knows_is_said_by_name() -> None:
    model = fused(torch.randn(12, 4))
    (group,) = split_parameters(model, units={"*.weight": {"rows": [4]}})
    assert Division.of(group["units"]) == Division(rows=(4,))
    assert Division.of({"rows": UserList([np.int64(4)])}) == Division(rows=(4,))
    (group,) = SpectralSphere(split_parameters(model, units={"Wqkv*": {}})).param_groups
    assert Division.of(group["units"]) == Division()
    split_parameters(model, units={"Wqkv*": {}, "*.weight": {"transposed": False}})
    with pytest.raises(
        ValueError, match=r"Wqkv.weight must have the same value, got .* for Wqkv\* and \*.weight"
    ):
        split_parameters(model, units={"Wqkv*": {}, "*.weight": {"rows": [4]}})
    with pytest.raises(ValueError, match="every pattern in units must match a parameter, .* other"):
        split_parameters(model, units={"Wqkv*": {}, "other": {}})
    with pytest.raises(ValueError, match=r"divide the 12 outputs .* got \(5,\)"):
        split_parameters(model, units={"Wqkv*": {"rows": [5]}})
    with pytest.raises(ValueError, match="and its two matrix axes are unknown"):
        split_parameters(fused(torch.randn(2, 4, 4), "experts"))


TABLE, HEAD = "is an embedding or an output head", "an output head"
NAMES = {"transformer.wte.weight": TABLE, "tok_emb.weight": TABLE}
NAMES |= {
    "shared.embed_tokens.weight": TABLE,
    "h.0.attn.c_attn.weight": "looks like several matrices fused into one",
}
for i in ("", 1):
    NAMES[f"lm_head.parametrizations.weight.original{i}"] = HEAD
    NAMES[f"qkv_proj.parametrizations.weight.original{i}"] = "several matrices"


@pytest.mark.parametrize("name", NAMES)
def test_names_are_checked_without_a_split(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*{NAMES[name]}"):
        SpectralSphere([(name, nn.Parameter(torch.zeros(4, 12)))])


def test_several_unnamed_matrices_are_reported_at_the_caller_s_line() -> None:
    model = module("wte 4 12, c_attn 12 4, head 4 5")
    weights = [*model.parameters()]
    with pytest.warns(UserWarning, match="^3 unnamed parameters .*split_parameters") as warned:
        SpectralSphere(weights)
    assert [each.filename for each in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SpectralSphere(weights[:1])
        SpectralSphere([{"params": weights, "units": {}}])
        AdamW(weights)
        SpectralSphere(split_parameters(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))))


def test_a_vector_is_no_matrix() -> None:
    with pytest.raises(
        ValueError, match="norm.weight.*put the parameter in a group with an elementwise rule"
    ):
        SpectralSphere([("norm.weight", nn.Parameter(torch.zeros(4)))])


@pytest.mark.parametrize("wrap", [torch.compile, lambda m: nn.ModuleDict({"model": m})])
def test_a_wrapped_model_s_head_is_one(wrap: Any) -> None:
    spectral, other = split_parameters(wrap(module("layer 4 4, output 4 9")))
    assert [len(group["params"]) for group in (spectral, other)] == [1, 1]
    assert other["rule"] == "adamw" and other["params"][0][1].shape == (9, 4)


MODEL = nn.Sequential(nn.Linear(2, 2))


WRONG: list[Any] = [
    (MODEL, {"elementwise": "head"}, TypeError, "elementwise must contain .* got 'head'"),
    (MODEL, {"elementwise": ["head.*"]}, TypeError, "elementwise must contain .* got 'head.*'"),
    (MODEL, {"elementwise": [nn.Linear(2, 2)]}, ValueError, "elementwise .* Linear.* from anot"),
    (MODEL, {"units": ["0.weight"]}, TypeError, r"units must be a mapping .* got \['0.weight'\]"),
    (
        MODEL,
        {"units": {"0*": {"row": []}}},
        ValueError,
        r"keys of units\['0\*'\] must be among rows, .* got row",
    ),
    (
        MODEL,
        {"units": {"0*": {"rows": []}, "*": {"rows": [0]}}},
        ValueError,
        r"units\['\*'\]\['rows'\] must be a list of positive integers, got \[0\]",
    ),
    (torch.jit.script(MODEL), {}, TypeError, "without torch.jit.script, got RecursiveScriptModule"),
    (MODEL.parameters(), {}, TypeError, "module must be a torch.nn.Module.* got generator"),
]


@pytest.mark.parametrize(("model", "options", "error", "message"), WRONG)
def test_a_split_of_something_else_is_refused(model, options, error, message) -> None:
    with pytest.raises(error, match=message):
        split_parameters(model, **options)
    with pytest.raises(TypeError, match=r"params must be parameters or split_parameters\(model\)"):
        Muon(MODEL)
    Muon(nn.ParameterList([MODEL[0].weight]))  # a module with only parameters


@pytest.mark.parametrize("replaced", [False, True])
def test_a_parameter_that_is_no_longer_frozen_is_named_once(replaced: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 3))
    split = split_parameters(model)
    assert str(split).endswith("\n   2 frozen and in no group: 1.weight ...")
    optimizer, batch = Muon(split), torch.ones(1, 2)
    model(batch).sum().backward()
    optimizer.step()
    if replaced:  # as by fully_shard
        model[1].weight = nn.Parameter(torch.ones(2, 2))
    model[1].weight.requires_grad_(True)
    optimizer.step()  # without a gradient
    model(batch).sum().backward()
    with pytest.warns(UserWarning, match=r"^1.weight will not be updated, because") as warned:
        optimizer.step()
    assert warned[0].filename == __file__
    optimizer.step()
    model[1].bias.requires_grad_(True)
    model(batch).sum().backward()
    with pytest.warns(UserWarning, match=r"^1.bias will not be updated, because"):
        optimizer.step()
    optimizer.step()
    later = Muon(split)
    later.add_param_group({"params": [("1.weight", model[1].weight)]})
    model[1].bias.grad = None
    before = model[1].weight.clone()
    later.step()
    assert not torch.equal(model[1].weight, before)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("example", [None, torch.tensor([[1, 2]])])
def test_a_table_that_is_tied_to_a_layer_before_it_stays(example: Tensor | None, kind: Any) -> None:
    model = module(
        "last 4 7, inner 4 4", lambda m, x: m.last(m.inner(m.table(x))), table=kind(7, 4)
    )
    model.last.weight = model.table.weight
    rows = split_parameters(model, example=example).rows
    rules = [("last.weight", "adamw"), ("inner.weight", "spectral")]
    assert [(row.name, row.rule) for row in rows] == rules
