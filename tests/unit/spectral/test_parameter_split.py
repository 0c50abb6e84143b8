"""The matrices that `split_parameters` finds in single layers, and its refusals."""

from collections import UserList
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spectral import Muon, SpectralSphere, split_parameters
from spectral.division import Division


class Fused(nn.Module):
    def __init__(self, weight: Tensor, name: str = "Wqkv") -> None:
        super().__init__()
        linear = nn.Linear(2, 2, bias=False)
        linear.weight = nn.Parameter(weight)
        self.add_module(name, linear)


@pytest.mark.parametrize(
    "name",
    ["Wqkv", "in_proj", "w13", "gate_up", "c_attn", "qkv_proj", "W_pack", "kv", "to_kv", "w_gu"]
    + ["gateup", "key_value", "ffn_in_glu", "v_gate"],
)
def test_an_unknown_fused_weight_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.weight looks like several matrices"):
        split_parameters(Fused(torch.randn(12, 4), name))


@pytest.mark.parametrize(
    ("outputs", "back", "fused"), [(16, 8, True), (24, 8, True), (8, 8, False)]
)
def test_what_a_sibling_takes_in_parts_is_fused(outputs: int, back: int, fused: bool) -> None:
    """The name does not matter: the gated layer `Wi` of ModernBERT is fused, the plain layer of T5
    is not."""
    block = nn.ModuleDict(
        {"wi": nn.Linear(6, outputs), "wo": nn.Sequential(nn.Linear(back, 6), nn.Dropout())}
    )
    if not fused:
        assert [row.matrices for row in split_parameters(block).rows if "weight" in row.name] == [
            1,
            1,
        ]
        return
    with pytest.raises(ValueError, match="wi.weight looks like .*uses its"):
        split_parameters(block)
    block["next"] = nn.Linear(outputs, 6)  # uses all outputs
    split_parameters(block)


class Bare(nn.Module):
    """Parameters of two dimensions that are not matrices."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {
            "gain": (1, 6),
            "A_log": (6, 4),
            "relative_position_bias_table": (9, 4),
        }.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))
        self.norm = nn.LayerNorm((2, 3))
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.gate = nn.Linear(6, 1)


def test_gains_and_biases_of_two_dimensions_are_no_matrices() -> None:
    split = split_parameters(Bare())
    matrices = [row.name for row in split.rows if row.rule != "adamw"]
    assert matrices == ["linear.parametrizations.weight.original1"]
    assert {g["weight_decay"] for g in split if "rule" in g} == {0.0}
    assert len(split_parameters(Bare(), units={"A_log": {}}).matrices) == 2


def test_attention_of_other_keys_is_divided_by_heads() -> None:
    attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4)
    rows = {row.name: (row.matrices, row.matrix) for row in split_parameters(attention).rows}
    assert rows["k_proj_weight"] == (2, (4, 6)) and rows["v_proj_weight"] == (2, (4, 4))


def test_fewer_keys_under_the_name_of_x_transformers_are_divided_by_heads() -> None:
    model = nn.Module()
    model.heads, model.kv_heads = 4, 2
    model.to_q, model.to_k, model.to_out = nn.Linear(8, 32), nn.Linear(8, 16), nn.Linear(32, 8)
    rows = {row.name: (row.matrices, row.matrix) for row in split_parameters(model).rows}
    assert rows["to_q.weight"] == (4, (8, 8)) and rows["to_k.weight"] == (2, (8, 8))


def test_keys_and_values_of_a_latent_are_apart_under_torchtitans_name() -> None:
    attention = Fused(torch.randn(28, 12), "wkv_b")
    attention.qk_nope_head_dim, attention.v_head_dim = 8, 6
    (group,) = split_parameters(attention)
    assert Division.of(group["units"]).rows == (8, 6)


def test_what_nobody_knows_is_said_by_name() -> None:
    model = Fused(torch.randn(12, 4))
    (group,) = split_parameters(model, units={"*.weight": {"rows": [4]}})
    assert Division.of(group["units"]) == Division(rows=(4,))
    assert Division.of({"rows": UserList([np.int64(4)])}) == Division(rows=(4,))
    (group,) = SpectralSphere(split_parameters(model, units={"Wqkv*": {}})).param_groups
    assert Division.of(group["units"]) == Division()
    split_parameters(model, units={"Wqkv*": {}, "*.weight": {"transposed": False}})
    with pytest.raises(
        ValueError, match=r"Wqkv.weight must have equal values, got .* for Wqkv\* and \*.weight"
    ):
        split_parameters(model, units={"Wqkv*": {}, "*.weight": {"rows": [4]}})
    with pytest.raises(ValueError, match="each pattern of units must match a parameter, .* other"):
        split_parameters(model, units={"Wqkv*": {}, "other": {}})
    with pytest.raises(ValueError, match=r"divide the 12 outputs .* got \(5,\)"):
        split_parameters(model, units={"Wqkv*": {"rows": [5]}})
    with pytest.raises(ValueError, match="whose matrix axes are unknown"):
        split_parameters(Fused(torch.randn(2, 4, 4), "experts"))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("transformer.wte.weight", (8, 4), "is an embedding or an output head"),
        ("tok_emb.weight", (8, 4), "is an embedding or an output head"),
        ("shared.embed_tokens.weight", (8, 4), "is an embedding or an output head"),
        ("h.0.attn.c_attn.weight", (4, 12), "looks like several matrices in one"),
        *(
            (f"{name}.parametrizations.weight.original{i}", (8, 4), message)
            for name, message in (("lm_head", "an output head"), ("qkv_proj", "several matrices"))
            for i in ("", 1)
        ),
        ("norm.weight", (4,), "put the parameter in a group with an elementwise rule"),
    ],
)
def test_names_are_checked_without_a_split(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        SpectralSphere([(name, nn.Parameter(torch.zeros(shape)))])


@pytest.mark.parametrize("wrap", [torch.compile, lambda m: nn.ModuleDict({"model": m})])
def test_a_wrapped_model_s_head_is_one(wrap: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.output = nn.Linear(4, 4, bias=False), nn.Linear(4, 9, bias=False)

    spectral, other = split_parameters(wrap(Model()))
    assert [len(group["params"]) for group in (spectral, other)] == [1, 1]
    assert other["rule"] == "adamw" and other["params"][0][1].shape == (9, 4)


MODEL = nn.Sequential(nn.Linear(2, 2))


@pytest.mark.parametrize(("model", "options", "error", "message"), [
    (MODEL, {"elementwise": ["head.*"]}, TypeError, "elementwise must be .* got 'head.*'"),
    (MODEL, {"elementwise": [nn.Linear(2, 2)]}, ValueError, "elementwise .* Linear.* of anot"),
    (MODEL, {"units": ["0.weight"]}, TypeError, r"units must be a mapping .* got \['0.weight'\]"),
    (MODEL, {"units": {"0*": {"row": []}}}, ValueError,
     r"units of '0\*': .* key row; its keys are rows"),
    (MODEL.parameters(), {}, TypeError, "module must be a torch.nn.Module, got generator"),
])  # fmt: skip
def test_a_split_of_something_else_is_refused(model, options, error, message) -> None:
    with pytest.raises(error, match=message):
        split_parameters(model, **options)
    with pytest.raises(TypeError, match=r"params must be parameters or split_parameters\(model\)"):
        Muon(MODEL)
    Muon(nn.ParameterList([MODEL[0].weight]))  # a module with only parameters


def test_a_parameter_that_is_no_longer_frozen_is_named_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    split = split_parameters(model)
    assert str(split).endswith("\n   2 frozen, in no group: 1.weight ...")
    optimizer, batch = Muon(split), torch.ones(1, 2)
    model(batch).sum().backward()
    optimizer.step()
    model[1].weight.requires_grad_(True)
    optimizer.step()  # without a gradient
    model(batch).sum().backward()
    with pytest.warns(UserWarning, match=r"^1.weight will not be updated, because"):
        optimizer.step()
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
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 7, bias=False)
            self.inner = nn.Linear(4, 4, bias=False)
            self.table = kind(7, 4)
            self.last.weight = self.table.weight

        def forward(self, tokens: Tensor) -> Any:
            return self.last(self.inner(self.table(tokens)))

    rows = split_parameters(Tied(), example=example).rows
    assert [(row.name, row.rule) for row in rows] == [
        ("last.weight", "adamw"),
        ("inner.weight", "spectral"),
    ]
