"""Results of `split_parameters` without an example, by kinds of weights.

Every result is compared with plain slices of the weight: a step on the weight equals the steps of
the slices, each of which is a parameter of a separate optimizer.
"""

import copy
import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
from safetensors import serialize
from torch import Tensor, nn
from torch.nn import functional as F

from spectral import Muon, split_parameters


def holder(name: str = "Holder", forward: Any = None, **members: Any) -> nn.Module:
    """A module of a class of some name, with modules, parameters and plain attributes."""
    module: nn.Module = type(name, (nn.Module,), {"forward": forward} if forward else {})()
    for key, value in members.items():
        setattr(module, key, value)
    return module


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False)


def grouped_linear(inputs: int, outputs: int, groups: int) -> nn.Module:
    """A layer that applies a part of its weight to each group of inputs."""
    layer = type("GroupedLinear", (nn.Linear,), {})(inputs, outputs, bias=False)
    layer.n_groups = groups
    return layer


def attention(width: int = 8, make: Any = linear, **says: Any) -> nn.Module:
    """Attention whose module has the attributes `says`, with projections named `q_proj` and so
    on."""
    return holder("Attention", **projections(width, make), o_proj=make(width, width), **says)


def projections(width: int, make: Any = linear) -> dict[str, nn.Module]:
    return {name: make(width, width) for name in ("q_proj", "k_proj", "v_proj")}


def named(names: str, width: int = 8, **says: Any) -> nn.Module:
    layers = {name: linear(width, width) for name in names.split()}
    return holder("Attention", **layers, **says)


def experts(name: str, router: bool = False, **members: Any) -> nn.Module:
    inner = holder(name, **members)
    return holder("Moe", experts=inner, **({"gate": linear(6, 3)} if router else {}))


def rows(n: int) -> Callable[[Tensor], list[Tensor]]:
    return lambda w: [*w.flatten(1).split(n)]


def columns(n: int) -> Callable[[Tensor], list[Tensor]]:
    return lambda w: [part.T for part in w.split(n, dim=1)]


def whole(weight: Tensor) -> list[Tensor]:
    return [weight.flatten(1)]


def adapted() -> nn.Module:
    """An adapter of a fused projection, as peft and torchtune build it."""
    layer = holder(
        "Linear",
        base_layer=linear(8, 24).requires_grad_(False),
        lora_A=nn.ModuleDict({"default": linear(8, 2)}),
        lora_B=nn.ModuleDict({"default": linear(2, 24)}),
    )
    return holder("Attention", qkv_proj=layer, num_heads=2, out=linear(8, 8))


def hooked(hook: Any) -> nn.Module:
    module = attention(num_heads=2)
    hook(module.q_proj)
    return module


def weight_norm(layer: nn.Module) -> nn.Module:
    """The hook of torch.nn.utils, which is deprecated and in use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


CASES: dict[str, tuple[Callable[[], nn.Module], str, Callable[[Tensor], list[Tensor]]]] = {
    # Groups of convolutions
    "grouped": (lambda: nn.Conv1d(8, 12, 3, groups=2), "weight", rows(6)),
    "depthwise with several outputs": (lambda: nn.Conv1d(4, 8, 3, groups=4), "weight", rows(2)),
    "grouped and transposed": (
        lambda: nn.ConvTranspose1d(8, 12, 3, groups=2),
        "weight",
        lambda w: [part.transpose(0, 1).flatten(1) for part in w.chunk(2)],
    ),
    "transposed": (
        lambda: nn.ConvTranspose2d(4, 2, 2),
        "weight",
        lambda w: [w.transpose(0, 1).flatten(1)],
    ),
    "convolution": (lambda: nn.Conv3d(3, 5, 2), "weight", whole),
    "heads of keys of a linear attention": (
        lambda: named("q_proj", head_k_dim=2, head_v_dim=4),
        "q_proj.weight",
        rows(2),
    ),
    "project_q": (lambda: named("project_q", dim_head=4), "project_q.weight", rows(4)),
    "a forget gate of heads": (lambda: named("f_b_proj", head_dim=2), "f_b_proj.weight", rows(2)),
    "a linear layer of groups": (
        lambda: holder("Attention", o_a_proj=grouped_linear(4, 12, 3)),
        "o_a_proj.weight",
        rows(4),
    ),
    # Heads, by their own size
    "q by head_dim": (lambda: attention(head_dim=4, v_head_dim=2), "q_proj.weight", rows(4)),
    "v of its own size": (lambda: attention(head_dim=4, v_head_dim=2), "v_proj.weight", rows(2)),
    "k of latent attention": (
        lambda: attention(qk_head_dim=2, v_head_dim=4, head_dim=1),
        "k_proj.weight",
        rows(2),
    ),
    "by their number": (lambda: attention(num_attention_heads=4), "v_proj.weight", rows(2)),
    "by the number of keys": (
        lambda: attention(num_heads=4, num_kv_heads=2),
        "k_proj.weight",
        rows(4),
    ),
    "BERT": (lambda: named("query key value", attention_head_size=2), "query.weight", rows(2)),
    "T5": (lambda: named("q k v o", key_value_proj_dim=4), "k.weight", rows(4)),
    "diffusers": (lambda: named("to_q to_k to_v", heads=2), "to_v.weight", rows(4)),
    "DistilBERT": (lambda: named("q_lin k_lin v_lin", n_heads=2), "q_lin.weight", rows(4)),
    "Conformer": (lambda: named("linear_q linear_k", head_dim=2), "linear_k.weight", rows(2)),
    "one head": (lambda: attention(num_heads=1), "q_proj.weight", whole),
    "a projection before layers that the model names first": (
        lambda: holder(
            forward=lambda m, x: m.blocks[0](m.enter(x)),
            blocks=nn.ModuleList([Block(), Block()]),
            enter=linear(8, 8),
        ),
        "enter.weight",
        whole,
    ),
    "convolutions": (
        lambda: attention(make=lambda i, o: nn.Conv2d(i, o, 1), heads=2),
        "q_proj.weight",
        rows(4),
    ),
    "qkv of a number": (
        lambda: holder("Attention", qkv=linear(8, 24), proj=linear(8, 8), num_heads=4),
        "qkv.weight",
        rows(2),
    ),
    "qkv of fewer keys": (
        lambda: holder("A", Wqkv=linear(8, 16), num_heads=4, num_key_value_heads=2),
        "Wqkv.weight",
        rows(2),
    ),
    "kv": (lambda: holder("A", to_kv=linear(8, 16), heads=2), "to_kv.weight", rows(4)),
    "qkv in a sequence": (
        lambda: holder("A", qkv=nn.Sequential(nn.Conv2d(8, 24, 1), nn.ReLU()), num_heads=2),
        "qkv.0.weight",
        rows(4),
    ),
    "indexer": (
        lambda: holder("Indexer", wq_b=linear(6, 8), n_heads=4, head_dim=2),
        "wq_b.weight",
        rows(2),
    ),
    "gated delta network": (
        lambda: holder(
            "Net",
            in_proj_qkv=linear(6, 4 * 2 + 6),
            in_proj_z=linear(6, 6),
            num_k_heads=2,
            head_k_dim=2,
            num_v_heads=2,
            head_v_dim=3,
        ),
        "in_proj_qkv.weight",
        lambda w: [*w.split([2, 2, 2, 2, 3, 3])],
    ),
    "its gate": (
        lambda: holder("Net", in_proj_z=linear(6, 6), norm=nn.LayerNorm(3), out=linear(6, 6)),
        "in_proj_z.weight",
        whole,
    ),
    "latent and rotary": (
        lambda: holder("A", kv_a_proj_with_mqa=linear(6, 10), kv_lora_rank=8, qk_rope_head_dim=2),
        "kv_a_proj_with_mqa.weight",
        lambda w: [w[:8], w[8:]],
    ),
    "Mamba": (
        lambda: holder("Mixer", x_proj=linear(8, 7), time_step_rank=3, ssm_state_size=2),
        "x_proj.weight",
        lambda w: [w[:3], w[3:5], w[5:]],
    ),
    # Names behind hooks, wrappers and adapters
    "weight_norm": (lambda: hooked(weight_norm), "q_proj.weight_v", rows(4)),
    "spectral_norm": (lambda: hooked(nn.utils.spectral_norm), "q_proj.weight_orig", rows(4)),
    "parametrized": (
        lambda: hooked(nn.utils.parametrizations.weight_norm),
        "q_proj.parametrizations.weight.original1",
        rows(4),
    ),
    "wrapped": (
        lambda: holder("A", q_proj=holder("Clipped", linear=linear(8, 8)), num_heads=2),
        "q_proj.linear.weight",
        rows(4),
    ),
    "adapter's outputs": (adapted, "qkv_proj.lora_B.default.weight", rows(4)),
    "adapter's inputs": (adapted, "qkv_proj.lora_A.default.weight", whole),
    # Recurrent layers
    "LSTM": (lambda: nn.LSTM(3, 4), "weight_ih_l0", rows(4)),
    "GRU": (lambda: nn.GRUCell(3, 4), "weight_hh", rows(4)),
    "LSTM's projection": (lambda: nn.LSTM(3, 4, proj_size=2), "weight_hr_l0", whole),
    # Experts
    "experts of a layout": (
        lambda: experts(
            "AnyExperts",
            gate_up_proj=parameter(2, 10, 6),
            down_proj=parameter(2, 6, 5),
            is_transposed=False,
        ),
        "experts.gate_up_proj",
        lambda w: [m for e in w for m in e.split(5)],
    ),
    "experts [in, out]": (
        lambda: experts(
            "QwenMoeTextExperts",
            gate_up_proj=parameter(2, 6, 10),
            down_proj=parameter(2, 5, 6),
            is_transposed=True,
        ),
        "experts.gate_up_proj",
        lambda w: [m.T for e in w for m in e.split(5, dim=1)],
    ),
    "experts' outputs": (
        lambda: experts("AnyExperts", is_transposed=True, down_proj=parameter(2, 5, 6)),
        "experts.down_proj",
        lambda w: [e.T for e in w],
    ),
    "interleaved experts": (
        lambda: experts(
            "AnyExperts",
            gate_up_proj=parameter(2, 6, 10),
            gate_up_proj_bias=parameter(2, 10),
            down_proj=parameter(2, 5, 6),
            is_transposed=True,
            is_concatenated=False,
        ),
        "experts.gate_up_proj",
        lambda w: [e[:, j::2].T for e in w for j in (0, 1)],
    ),
    # Weights that are plainly one matrix
    "feed-forward": (
        lambda: holder("Mlp", fc1=linear(8, 32), fc2=linear(32, 8)),
        "fc1.weight",
        whole,
    ),
    "merge of patches": (
        lambda: nn.Sequential(
            holder("Merge", norm=nn.LayerNorm(16), reduction=linear(16, 8)),
            holder("Block", norm=nn.LayerNorm(8), fc1=linear(8, 32), fc2=linear(32, 8)),
        ),
        "0.reduction.weight",
        whole,
    ),
    "linear with a norm in its class": (
        lambda: holder(mixed=holder("LayerNormLinear", weight=parameter(6, 4))),
        "mixed.weight",
        whole,
    ),
    "below an embedding": (
        lambda: holder(embed_tokens_extend=holder(encoder=linear(4, 4))),
        "embed_tokens_extend.encoder.weight",
        whole,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_the_steps_of_the_pieces(name: str) -> None:
    build, weight, pieces = CASES[name]
    torch.manual_seed(0)
    model = build().double()
    p = model.get_parameter(weight)
    optimizer = Muon(split_parameters(model), lr=0.1, weight_decay=0.0)
    before, p.grad = p.detach().clone(), torch.randn_like(p)
    optimizer.step()
    for start, gradient, end in zip(*map(pieces, (before, p.grad, p.detach())), strict=True):
        piece = nn.Parameter(start.clone())
        piece.grad = gradient.clone()
        Muon([piece], lr=0.1, weight_decay=0.0).step()
        difference = (end - piece).norm() / (piece - start).norm()
        assert difference < 1e-5, "the rounding of the products, whose order differs"


def test_every_piece_is_a_matrix_of_the_case() -> None:
    """Otherwise slices that coincide with one matrix would remain undetected."""
    for name, (build, weight, pieces) in CASES.items():
        model = build()
        (row,) = [row for row in split_parameters(model).rows if row.name == weight]
        assert row.rule == "spectral", name
        assert row.matrices == len(pieces(model.get_parameter(weight).detach())), name


ELEMENTWISE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "depthwise": (lambda: nn.Conv1d(64, 64, 4, groups=64), "weight"),
    "router": (lambda: holder(gate=linear(6, 3), experts=nn.ModuleList([linear(6, 6)])), "gate"),
    "torchtitan's": (
        lambda: holder(router=holder("R", gate=linear(6, 3)), experts=holder(w=linear(6, 6))),
        "router.gate",
    ),
    "router in a class": (
        lambda: holder(gate=holder("TopKRouter", weight=parameter(3, 6)), experts=linear(6, 6)),
        "gate",
    ),
    "JetMoe's": (
        lambda: holder(
            router=holder("TopKGating", layer=linear(6, 3)),
            mlp=holder("ParallelExperts", w=linear(6, 6)),
        ),
        "router.layer",
    ),
    "relative positions": (lambda: holder(rel_pos_h=parameter(7, 4)), "rel_pos_h"),
    "attention biases": (lambda: holder(attention_biases=parameter(4, 49)), "attention_biases"),
    "latents": (lambda: holder(latents=parameter(6, 8)), "latents"),
    "queries": (lambda: holder(query_tokens=parameter(1, 6, 8)), "query_tokens"),
    "tokens of an unknown name": (lambda: holder(thing=parameter(1, 6, 8)), "thing"),
    "prompts": (lambda: holder(p=holder(prompt_embeddings=parameter(6, 8))), "p.prompt_embeddings"),
    "a magnitude": (lambda: weight_norm(nn.Linear(5, 5)), "weight_g"),
    "head": (lambda: trunk(("unembed", linear(8, 9))), "unembed"),
    "head that was saved": (
        lambda: trunk(
            (
                "score",
                holder(
                    original_module=linear(8, 2).requires_grad_(False),
                    modules_to_save=nn.ModuleDict({"default": linear(8, 2)}),
                ),
            )
        ),
        "score.modules_to_save.default",
    ),
    "head of a classifier": (
        lambda: trunk(("classifier", nn.Sequential(linear(8, 8), nn.ReLU(), linear(8, 9)))),
        "classifier.2",
    ),
    "head that timm names": (lambda: named_head("get_classifier"), "backbone.out"),
    "head that transformers name": (lambda: named_head("get_output_embeddings"), "backbone.out"),
    "last of the layers of a named head": (
        lambda: named_head("get_classifier", nn.Sequential(linear(6, 6), nn.ReLU(), linear(6, 9))),
        "backbone.out.2",
    ),
    "heads in a named list": (
        lambda: named_head("get_classifier", nn.ModuleList([linear(6, 9), linear(6, 2)])),
        "backbone.out.0",
    ),
    "heads in a named mapping": (
        lambda: named_head("get_classifier", nn.ModuleDict({"a": linear(6, 9), "b": linear(6, 2)})),
        "backbone.out.a",
    ),
}


def named_head(getter: str, head: nn.Module | None = None) -> nn.Module:
    """A model that names its head by a method, inside another model."""
    model: nn.Module = type("Named", (nn.Module,), {getter: lambda self: self.out})()
    model.out = head or linear(6, 9)
    return holder(backbone=model, neck=linear(6, 6))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_is_no_matrix_goes_to_adamw(name: str) -> None:
    build, weight = ELEMENTWISE[name]
    model = holder(other=nn.Sequential(linear(5, 5), linear(5, 5)), model=build())
    rows = {
        row.name.removeprefix("model.").removesuffix(".weight"): row
        for row in split_parameters(model).rows
    }
    assert rows[weight].rule == "adamw"
    assert {rows["other.0"].rule, rows["other.1"].rule} == {"spectral"}


def test_inner_layers_of_a_named_head_are_matrices() -> None:
    model = named_head("get_classifier", nn.Sequential(linear(6, 5), nn.ReLU(), linear(5, 9)))
    rules = {row.name: row.rule for row in split_parameters(model).rows}
    assert rules["backbone.out.0.weight"] == "spectral"
    assert rules["backbone.out.2.weight"] == "adamw"


def parts(forward: Any) -> nn.Module:
    """Two convolutions, each of half of the channels, as in SKNet and ShuffleNet."""
    return holder("Parts", forward, a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 4, 3, padding=1))


def both(m: Any, x: Tensor) -> list[Tensor]:
    return [m.a(x.split(4, 1)[0]), m.b(x.split(4, 1)[1])]


def chunked(m: Any, x: Tensor) -> list[Tensor]:
    a, b = x.chunk(2, 1)
    return [m.a(a), m.b(b)]


def wrapped(module: nn.Module) -> nn.Module:
    """Return a module whose forward pass is another function, as with hooks of accelerate."""
    forward = module.forward
    module.forward = functools.wraps(forward)(lambda *arguments: forward(*arguments))
    return module


def first_half(x: Tensor) -> Tensor:
    return x[:, :4]


def attend(x: Tensor) -> Tensor:
    x = heads_of(x)
    return F.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


def scored(m: Any, x: Tensor) -> Tensor:
    scores = heads_of(m.q(x)) @ heads_of(m.k(x)).mT
    return (scores.softmax(-1) @ heads_of(x)).transpose(1, 2).flatten(2)


def queried(m: Any, x: Tensor) -> Tensor:
    k, v = next(m.children())(x).chunk(2, -1)
    return F.scaled_dot_product_attention(*map(heads_of, (x, k, v))).transpose(1, 2).flatten(2)


def per_head(m: Any, x: Tensor) -> Tensor:
    heads = heads_of(x)
    mixed = F.scaled_dot_product_attention(m.q_proj(heads), m.k_proj(heads), m.v_proj(heads))
    return m.out(mixed.transpose(1, 2).flatten(2))


def pooled(m: Any, x: Tensor) -> Tensor:
    heads = heads_of(m.norm(x))
    return ((m.query_tokens @ heads.mT) @ heads).transpose(1, 2).flatten(2)


def hypermixing(**layers: nn.Module) -> nn.Module:
    """Return a module in which each head of the inputs mixes tokens by generated weights."""

    def mixed(m: Any, x: Tensor) -> Tensor:
        tokens = x.mT.reshape(2 * len(x), 4, -1)
        return (tokens @ m.make(x).reshape(2 * len(x), -1, 4) @ tokens).reshape(x.shape)

    return holder("Mixing", mixed, **layers)


UNKNOWN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gate in a module of its own": (
        lambda: holder(net=nn.Sequential(holder(proj=linear(8, 24)), nn.Dropout(), linear(12, 8))),
        "net.0.proj.weight looks like .*no layer uses its 24 outputs",
    ),
    "a gate as wide as the last layer's outputs": (
        lambda: nn.Sequential(
            holder("Gate", lambda m, x: F.glu(m.proj(x)), proj=linear(10, 24)), linear(12, 24)
        ),
        "0.proj.weight looks like .*no layer uses its 24 outputs",
    ),
    "convolutional qkv": (
        lambda: holder(to_qkv=nn.Conv2d(16, 48, 1), to_out=nn.Conv2d(16, 16, 1)),
        "to_qkv.weight looks like .*its name is to_qkv",
    ),
    "nine chunks in a block": (
        lambda: holder(norm=holder(linear=linear(8, 72)), attn=attention(num_heads=2)),
        "norm.linear.weight looks like .*uses its 72",
    ),
    "branches that take parts": (
        lambda: holder(stem=nn.Conv2d(3, 8, 1), block=parts(chunked), out=nn.Conv2d(8, 4, 1)),
        "stem.weight looks like .*Parts splits channels",
    ),
    "parts in a forward pass that is wrapped": (
        lambda: holder(
            stem=nn.Conv2d(3, 8, 1), block=wrapped(parts(chunked)), out=nn.Conv2d(8, 4, 1)
        ),
        "stem.weight looks like .*Parts splits channels",
    ),
    "parts in a method": (
        lambda: holder(
            stem=nn.Conv2d(3, 8, 1),
            block=parts(lambda m, x: torch.cat(both(m, x), 1)),
            out=nn.Conv2d(8, 4, 1),
        ),
        "stem.weight looks like .*Parts splits channels",
    ),
    "heads in groups": (
        lambda: holder(to_qkv=nn.Conv1d(24, 24, 1, groups=3), out=nn.Conv1d(8, 8, 1)),
        "to_qkv.weight: its groups may contain several heads",
    ),
    "heads that a bare parameter shows": (
        lambda: holder(
            gat=holder(w=linear(8, 12), source=parameter(1, 3, 4), target=parameter(1, 3, 4)),
            out=linear(12, 4),
        ),
        "gat.w.weight looks like .*source arranges its 12 outputs along 2 axes",
    ),
    "joined outputs": (
        lambda: nn.Sequential(nn.Conv2d(16, 8, 3), nn.Conv2d(24, 8, 3), nn.Conv2d(32, 16, 1)),
        "0.weight looks like .*uses its 8",
    ),
    "pixels": (
        lambda: nn.Sequential(nn.Conv2d(4, 16, 3), nn.PixelShuffle(2), nn.Conv2d(4, 3, 3)),
        "0.weight looks like .*uses its 16",
    ),
    "a projection without heads": (attention, "q_proj.weight looks like .*its name is q_proj"),
    "another layer of attention": (
        lambda: named("q_proj k_proj mixed o_proj", num_heads=2),
        "mixed.weight looks like .*attention module also projects heads",
    ),
    "a convolution of keys that queries scale": (
        lambda: named("query key value key_conv_attn_layer", num_heads=2),
        "key_conv_attn_layer.weight looks like .*attention module also projects heads",
    ),
    "unequal parts": (
        lambda: holder(inner=linear(8, 7), rank=linear(3, 8), out=linear(8, 8)),
        "inner.weight looks like .*uses its 7",
    ),
    "heads that do not divide": (
        lambda: attention(head_dim=3),
        "q_proj.weight looks like .*heads of Attention do not divide the weight's 8",
    ),
    "queries narrower than the heads' size": (
        lambda: attention(head_dim=4, num_heads=4),
        "q_proj.weight looks like .*heads of Attention do not divide the weight's 8",
    ),
    "keys next to such queries": (
        lambda: named("k_proj v_proj q_proj", head_dim=4, num_heads=4),
        "k_proj.weight looks like .*heads of Attention do not divide the weight's 8",
    ),
    "values of several vectors per head": (
        lambda: named("q_proj v_proj", head_dim=2, num_heads=2, num_kv_heads=1),
        "v_proj.weight looks like .*heads of Attention do not divide the weight's 8",
    ),
    "values wider than the heads' size": (
        lambda: holder("Attention", v_proj=linear(8, 16), head_dim=4, num_heads=2),
        "v_proj.weight looks like .*heads of Attention do not divide the weight's 16",
    ),
    "values of another size": (
        lambda: holder(qkv=linear(8, 24), head_dim=4, v_head_dim=2),
        "qkv.weight looks like",
    ),
    "adapter of a fused weight": (
        lambda: holder(gate_in=holder(lora_a=linear(8, 2), lora_b=linear(2, 24)), o=linear(12, 8)),
        "gate_in.lora_b.weight looks like .*uses its 24",
    ),
    "spectral_norm": (
        lambda: holder(wi=nn.utils.spectral_norm(linear(8, 24)), wo=linear(12, 8)),
        "wi.weight_orig looks like .*uses its 24",
    ),
    "experts that state no layout": (
        lambda: experts(
            "TextExperts", gate_up_proj=parameter(2, 6, 10), down_proj=parameter(2, 5, 6)
        ),
        r"gate_up_proj has shape \(2, 6, 10\), whose matrix axes are unknown",
    ),
    "three dimensions": (lambda: holder(kernel=parameter(3, 4, 5)), "kernel has shape"),
    "queries that multiply tokens": (
        lambda: holder(queries=parameter(4, 6)),
        "its name is queries",
    ),
    "experts in attention": (
        lambda: holder(
            mix=holder("Mixture", experts=holder(weight=parameter(3, 8, 6)), gate=linear(6, 3))
        ),
        "whose matrix axes are unknown",
    ),
    "focal modulation": (
        lambda: holder(projection_in=linear(8, 19), projection_out=linear(8, 8)),
        "projection_in.weight looks like several matrices",
    ),
    "a size that the config alone says": (
        lambda: holder("Conv", in_proj=linear(8, 12), config=holder(intermediate_size=6)),
        "in_proj.weight looks like several matrices",
    ),
    "fused heads of other sizes": (
        lambda: holder("Attention", qkv=linear(8, 48), num_heads=2, key_dim=4, val_dim=16),
        "heads of Attention do not divide the weight's 48 outputs",
    ),
    "a bare weight": (lambda: holder(real_weight=parameter(4, 6)), "may be rows or columns"),
    "a stack of one": (
        lambda: holder(fc_weights=parameter(1, 4, 6)),
        "whose matrix axes are unknown",
    ),
    # What the forward pass does with the outputs
    "projections of two towers": (
        lambda: holder(
            "Clip",
            lambda m, a: m.text(m.trunk(a)) @ m.image(a).mT,
            **{"trunk": trunk(), "text": linear(8, 6), "image": linear(8, 6)},
        ),
        "text.weight could be an output head or a single matrix: Clip adds or multiplies",
    ),
    "a last layer that is added": (
        lambda: trunk(("pool", holder("Pool", lambda m, x: x + m.mlp(x), mlp=MLP(8, 24, 8)))),
        "mlp.layers.1.weight could be an output head or a single matrix: Pool adds",
    ),
    "a pooler before other blocks": (
        lambda: holder(
            tower=trunk(("pooler", linear(8, 8))), more=nn.ModuleList([Block(), Block()])
        ),
        "tower.pooler.weight could be an output head or a single matrix: other blocks run after",
    ),
    "a first layer, whose outputs are joined": (
        lambda: holder(enter=linear(16, 4), blocks=nn.ModuleList([Block(), Block()])),
        "enter.weight looks like .*uses its 4",
    ),
    "a last layer of gates": (
        lambda: holder(
            cell=holder("Cell", lambda m, h: m.norm(m.g(h)).chunk(4, -1), g=linear(8, 32)),
            up=linear(32, 8),
        ),
        "cell.g.weight looks like .*Cell splits channels",
    ),
    "values of heads that are joined": (
        lambda: holder(
            "Diff",
            lambda m, x: torch.cat(torch.chunk(m.v_proj(x).view(2, 4, -1), 2), -1),
            v_proj=linear(8, 8),
            num_heads=2,
        ),
        "v_proj.weight looks like .*heads of Diff .* or are concatenated",
    ),
    "queries beside a token that no layer projects": (
        lambda: holder(
            "Attention",
            to_q=holder("Conv", lambda m, x: torch.cat([x[:1], m.net(x)]), net=linear(8, 8)),
            heads=2,
        ),
        "to_q.net.weight looks like .*heads of Attention .* or are concatenated",
    ),
    "channels that a slice takes apart": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 1),
            holder("Ghost", lambda m, x: m.b(x[:, :4]), b=nn.Conv2d(4, 8, 1)),
            nn.Conv2d(8, 4, 1),
        ),
        "0.weight looks like .*Ghost splits channels",
    ),
    "channels that a function takes apart": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 1),
            holder("Ghost", lambda m, x: m.b(first_half(x)), b=nn.Conv2d(4, 8, 1)),
            nn.Conv2d(8, 4, 1),
        ),
        "0.weight looks like .*Ghost splits channels",
    ),
    "tokens that generated layers mix by heads": (
        lambda: holder(enter=MLP(8, 8), mix=hypermixing(make=nn.LayerNorm(8)), out=linear(8, 3)),
        "enter.layers.0.weight looks like .*Mixing may divide its inputs into heads",
    ),
    "attention whose values no layer projects": (
        lambda: holder(
            enter=MLP(8, 8),
            mix=holder("Core", lambda m, x: attend(m.norm(x)), norm=nn.LayerNorm(8)),
            out=linear(8, 3),
        ),
        "enter.layers.0.weight looks like .*Core may divide its inputs into heads",
    ),
    "values that are inputs beside projected queries and keys": (
        lambda: holder(
            enter=MLP(8, 8), mix=holder("Core", scored, heads=2, q=linear(8, 8), k=linear(8, 8))
        ),
        "enter.layers.0.weight looks like .*Core may divide its inputs into heads",
    ),
    "heads of inputs that are projected one by one": (
        lambda: holder(
            enter=MLP(8, 8),
            mix=holder("Core", per_head, head_dim=4, **projections(4), out=linear(8, 8)),
        ),
        "enter.layers.0.weight looks like .*Core may divide its inputs into heads",
    ),
    "queries that are inputs beside fused keys and values": (
        lambda: holder(
            enter=MLP(8, 8),
            mix=holder("Core", queried, head_dim=4, qkv=linear(8, 16)),
            out=linear(8, 3),
        ),
        "enter.layers.0.weight looks like .*Core may divide its inputs into heads",
    ),
    "queries that are inputs beside a layer of keys and values": (
        lambda: holder(
            enter=MLP(8, 8),
            mix=holder("Core", queried, heads=2, kv=linear(8, 16)),
            out=linear(8, 3),
        ),
        "enter.layers.0.weight looks like .*Core may divide its inputs into heads",
    ),
    "queries of a parameter and values that are inputs": (
        lambda: holder(
            enter=MLP(8, 8),
            mix=holder("Core", pooled, query_tokens=parameter(3, 4), norm=nn.LayerNorm(8)),
            out=linear(8, 3),
        ),
        "enter.layers.0.weight looks like .*Core may divide its inputs into heads",
    ),
    "a pooler beside a tower and a layer that takes no pooled outputs": (
        lambda: holder(
            tower=trunk(("pooler", linear(8, 8))), neck=linear(8, 8), more=nn.ModuleList([Block()])
        ),
        "tower.pooler.weight could be an output head or a single matrix: other blocks run after",
    ),
    "a projection of a tower before another tower": (
        lambda: holder(
            "Clip",
            lambda m, a, b: m.text(a) @ m.image(b).mT,
            text=trunk(("end", linear(8, 8))),
            image=trunk(("end", linear(8, 8))),
        ),
        "text.end.weight could be an output head or a single matrix: other blocks run after",
    ),
    "a last layer of an encoder before a decoder": (
        lambda: holder(encoder=trunk(("end", linear(8, 8))), decoder=nn.ModuleList([Block()])),
        "encoder.end.weight could be an output head or a single matrix: other blocks run after",
    ),
    "a layer between blocks that the blocks may not take": (
        lambda: holder(
            first=nn.ModuleList([Block()]), auxiliary=linear(8, 8), second=nn.ModuleList([Block()])
        ),
        "auxiliary.weight could be an output head or a single matrix: other blocks run after",
    ),
    "keys narrower than queries": (
        lambda: holder("A", to_q=linear(8, 8), to_kv=linear(8, 4), heads=4),
        "to_kv.weight looks like .*: heads of A",
    ),
    "outputs of several pixels": (
        lambda: nn.Sequential(
            holder("Merge", down=nn.Conv2d(32, 8, 1)),
            holder("Split", lambda m, x: F.pixel_shuffle(m.up(x), 2), up=nn.Conv2d(8, 32, 1)),
            nn.Conv2d(8, 4, 1),
        ),
        "1.up.weight looks like .*Split splits channels",
    ),
    "a projection that may be [in, out]": (
        lambda: holder("A", proj_k=parameter(16, 4), head_dim=4),
        "proj_k looks like .*its name is proj_k",
    ),
    "a mix of heads": (
        lambda: holder("Attend", heads=4, pre=nn.Conv2d(4, 4, 1), post=nn.Conv2d(4, 4, 1)),
        "pre.weight looks like .*it mixes the 4 heads",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_nothing_says_is_refused(name: str) -> None:
    build, message = UNKNOWN[name]
    with pytest.raises(ValueError, match=message) as error:
        split_parameters(build())
    advice = ["example=", "units=", "elementwise="]
    assert [word for word in advice if word in str(error.value)] == advice


def test_a_list_may_have_places_without_a_module() -> None:
    layers: Any = [nn.ModuleList([None, linear(8, 6), linear(6, 8)]) for _ in range(2)]
    split = split_parameters(holder(layers=nn.ModuleList(layers), out=linear(8, 3)))
    assert [row.rule for row in split.rows] == ["spectral"] * 4 + ["adamw"]


def branch(
    forward: Any, inner: int = 8, layer: Callable[[int, int], nn.Module] = linear, **says: Any
) -> nn.Module:
    """A layer whose outputs, as many as the model is wide, are halves or heads."""
    return holder("Branch", forward, wide=layer(8, 8), out=layer(inner, 8), **says)


def heads(m: Any, x: Tensor) -> Any:
    q = m.wide(x).view(*x.shape[:2], 2, 4).transpose(1, 2)
    return m.out((q @ q.mT @ q).transpose(1, 2).flatten(2))


def heads_in_a_loop(m: Any, x: Tensor) -> Any:
    q, k = (layer(x).unflatten(-1, (2, 4)) for layer in (m.wide, m.wide))
    return m.out((q * k).flatten(2))


def positions(m: Any, x: Tensor) -> Any:
    q = m.wide(x).reshape(len(x), 2, 4, -1)
    return m.out((q @ q.mT @ q).reshape(x.shape))


def interleaved(m: Any, x: Tensor) -> Any:
    pairs = m.wide(x).view(len(x), 4, 2)
    return m.out(pairs[..., 0] * pairs[..., 1])


def kept(m: Any, x: Tensor) -> Any:
    gate, up = m.cut(m.wide(x))
    return m.out(gate * up)


def gated(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return torch.cat([gate * up, up], -1)


class Gated(nn.Module):
    """Functions that call `gated`, and a module without layers."""

    twice = staticmethod(lambda y: gated(gated(y)))
    once = functools.partialmethod(lambda self, times, y: gated(y), 1)
    forward = staticmethod(gated)


GATED = Gated()


class Next(nn.Module):
    """A layer that divides its inputs."""

    cut = staticmethod(gated)

    def __init__(self) -> None:
        super().__init__()
        self.out = linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(gated(x))


class Function(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(context: Any, y: Tensor) -> Tensor:
        return gated(y)


def called(function: Any) -> Callable[..., Tensor]:
    """Return a forward pass that calls a function in its closure."""
    return lambda m, x: m.out(function(m.wide(x)))


def imported(m: Any, x: Tensor) -> Tensor:
    from spectral.batching import split_like as cut

    return m.out(torch.cat(cut(m.wide(x), [x, x]), -1))


SPLIT = Function.apply


@torch.library.custom_op("spectrain_tests::part", mutates_args=())
def part(y: Tensor) -> Tensor:
    return y.clone()


@triton.jit
def kernel(y: Any) -> None:
    """Read no code of this kernel."""


tuned = triton.autotune(configs=[triton.Config({})], key=[])(kernel)


def gated_halves(m: Any, x: Tensor) -> Tensor:
    y = m.wide(x)
    return torch.cat([y[:, :4] * y[:, 4:], x[:, 4:]], 1)


def not_imported(m: Any, x: Tensor) -> Tensor:
    from safetensors.flax import save

    return m.out(save(m.wide(x)))


def inherited() -> nn.Module:
    """Return a module whose class calls the forward pass of its base."""
    base = type(branch(called(gated)))
    layer = branch(lambda m, x: super(type(layer), m).forward(x))
    layer.__class__ = type("Branch", (type(layer), base), {})
    return layer


@pytest.mark.parametrize(
    "build",
    [
        lambda: branch(lambda m, x: m.out(F.glu(m.wide(x))), 4),
        lambda: branch(lambda m, x: m.out(m.wide(x)[..., :4] * m.wide(x)[..., 4:]), 4),
        lambda: branch(interleaved, 4),
        lambda: branch(heads),
        lambda: branch(heads_in_a_loop),
        lambda: branch(kept, 4, cut=functools.partial(torch.chunk, chunks=2, dim=-1)),
        lambda: branch(kept, 4, cut=lambda y: y.split(4, -1)),
        lambda: branch(positions, layer=lambda n, m: nn.Conv2d(n, m, 1)),
        lambda: branch(lambda m, x: m.out(m.wide(x)[:, :, :4] * m.wide(x)[:, :, 4:]), 4),
        lambda: branch(lambda m, x: m.out(Gated.twice(m.wide(x)))),
        lambda: branch(lambda m, x: m.out(Function.apply(m.wide(x)))),
        lambda: branch(lambda m, x: m.out(m.cut(m.wide(x))), cut=Gated()),
        lambda: branch(called(functools.lru_cache(gated))),
        lambda: branch(called(lambda y: gated(y))),
        lambda: branch(called(torch.jit.script(gated))),
        lambda: branch(lambda m, x: m.out(GATED.once(m.wide(x)))),
        lambda: branch(lambda m, x, cut=gated: m.out(cut(m.wide(x)))),
        lambda: branch(lambda m, x: m.out(m.cut["gated"](m.wide(x))), cut={"gated": gated}),
        lambda: branch(lambda m, x: m.out(m.next.cut(m.wide(x))), next=Next()),
        lambda: branch(imported),
        inherited,
        lambda: nn.Sequential(OrderedDict(wide=linear(8, 8), cut=Gated(), out=linear(8, 8))),
        # Functions of torch, whose code is not read.
        lambda: nn.Sequential(OrderedDict(wide=linear(8, 8), cut=nn.GLU(), out=linear(4, 8))),
        lambda: branch(kept, 4, cut=nn.Unflatten(-1, (2, 4))),
        lambda: nn.Sequential(OrderedDict(wide=linear(8, 8), next=Next())),
        lambda: branch(lambda m, x: m.out(SPLIT(m.wide(x)))),
        lambda: branch(lambda m, x: m.out(serialize(m.wide(x)))),
        lambda: branch(lambda m, x: m.out(torch.ops.spectrain_tests.part(m.wide(x)))),
        lambda: branch(called(part)),
        lambda: branch(lambda m, x: kernel[(1,)](m.out(m.wide(x)))),
        lambda: branch(lambda m, x: tuned[(1,)](m.out(m.wide(x)))),
        lambda: branch(not_imported),
        lambda: holder("Gate", gated_halves, wide=linear(8, 8)),
    ],
)
def test_a_layer_that_fits_its_neighbour_and_may_be_cut_is_refused(build) -> None:
    model = nn.Sequential(linear(8, 8), build(), linear(8, 3))
    why = "(splits channels|calls code that cannot be read)"
    with pytest.raises(ValueError, match=f"1.wide.weight looks like .*{why}"):
        split_parameters(model)


def test_slices_of_tokens_do_not_divide_a_layer() -> None:
    shift = holder("Shift", lambda m, x: x[:, 1:] + m.wide(x)[:, :-1], wide=linear(8, 8))
    split = split_parameters(nn.Sequential(linear(8, 8), shift, linear(8, 3)))
    (row,) = [row for row in split.rows if row.name == "1.wide.weight"]
    assert row.reason == "one matrix"


@pytest.mark.parametrize(
    "container",
    [
        lambda layer: nn.Sequential(layer),
        lambda layer: nn.ModuleList([layer]),
        lambda layer: nn.ModuleDict({"0": layer}),
        lambda layer: nn.Sequential(nn.Sequential(nn.SiLU(), layer)),
    ],
)
def test_a_layer_in_a_container_may_be_cut_by_the_module_around(container: Any) -> None:
    inner = branch(lambda m, x: m.out(m.wide[0](x).chunk(2, -1)[0]), 4)
    inner.wide = container(inner.wide)
    model = nn.Sequential(linear(8, 8), inner, linear(8, 3))
    with pytest.raises(ValueError, match=r"^1.wide.*weight looks like .*Branch splits channels"):
        split_parameters(model)


@pytest.mark.parametrize("joined", [lambda x: x.view(-1, 8), lambda x: x.reshape(len(x), -1)])
def test_images_may_be_joined_to_rows_before_a_layer(joined: Callable[[Tensor], Tensor]) -> None:
    def digits(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.fc1(joined(x)))
        return F.log_softmax(m.fc3(F.relu(m.fc2(x.view(-1, 8)))), dim=-1)

    layers: Any = {"fc1": linear(8, 8), "fc2": linear(8, 8), "fc3": linear(8, 3)}
    model = holder("Digits", digits, **layers)
    rows = {row.name: row.rule for row in split_parameters(model).rows if "weight" in row.name}
    assert rows == {"fc1.weight": "spectral", "fc2.weight": "spectral", "fc3.weight": "adamw"}


def test_a_layer_named_as_a_function_takes_nothing_apart() -> None:
    layers: Any = {"first": linear(8, 8), "narrow": linear(8, 5), "chunk": linear(5, 8)}
    block = holder("Chunked", lambda m, x: m.chunk(m.narrow(m.first(x))), **layers)
    split = split_parameters(holder(block=block, out=linear(8, 8)))
    assert "first.weight" in str(split)


@pytest.mark.parametrize("kept", [torch.ones(8), np.ones(8), [1.0], 1.0], ids=type)
def test_a_forward_pass_may_use_what_is_no_function(kept: Any) -> None:
    added = branch(lambda m, x: m.out(m.wide(x) + m.kept), kept=kept)
    split = split_parameters(nn.Sequential(linear(8, 8), added, linear(8, 3)))
    assert split.rows[1].rule == "spectral"


def test_a_parameter_may_be_elementwise() -> None:
    model = holder(bare=parameter(4, 6), layer=linear(4, 4))
    rows = {row.name: row.rule for row in split_parameters(model, elementwise=model.bare).rows}
    assert rows == {"bare": "adamw", "layer.weight": "spectral"}


@pytest.mark.parametrize(
    "flattened",
    [
        lambda: holder(layer=linear(4, 4), bias=nn.Parameter(torch.empty(0))),
        lambda: holder(_flat_param=parameter(64), layer=linear(4, 4)),
    ],
)
def test_flattened_parameters_are_refused(flattened: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"use fully_shard \(FSDP2\) or DDP"):
        split_parameters(flattened())


def test_a_shard_of_a_flat_weight_is_refused() -> None:
    model = nn.Sequential(linear(4, 4), linear(4, 4))
    model[1].weight = parameter(8)  # as after FSDP1 with use_orig_params
    with pytest.raises(ValueError, match=r"1.weight has shape \(8,\)"):
        split_parameters(model)


def test_a_split_without_a_matrix_is_an_error() -> None:
    for model in (nn.LayerNorm(4), nn.Embedding(4, 3), linear(4, 4)):
        with pytest.raises(ValueError, match="no parameter .* uses the optimizer's rule"):
            split_parameters(model, elementwise=model if isinstance(model, nn.Linear) else ())


class Block(nn.Module):
    """A layer of a model."""

    def __init__(self, **members: Any) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), linear(8, 32), linear(32, 8)
        for name, module in members.items():
            setattr(self, name, module)


class MLP(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        layers = [linear(*pair) for pair in zip(sizes, sizes[1:], strict=False)]
        self.layers = nn.ModuleList(layers)


def trunk(*heads: tuple[str, nn.Module], **block: Any) -> nn.Module:
    """A model of two layers that contain `block`, followed by heads."""
    blocks = nn.ModuleList([Block(**block) for _ in range(2)])
    return holder(patches=nn.Conv2d(3, 8, 2), blocks=blocks, norm=nn.LayerNorm(8), **dict(heads))


ENDINGS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "DETR": (
        lambda: trunk(("class_embed", linear(8, 92)), ("bbox_embed", MLP(8, 8, 4))),
        ["class_embed", "bbox_embed.layers.1"],
    ),
    "a head of each layer": (
        lambda: trunk(
            ("class_embed", nn.ModuleList([linear(8, 2), linear(8, 2)])), ("boxes", MLP(8, 8, 5))
        ),
        ["class_embed.0", "class_embed.1", "boxes.layers.1"],
    ),
    "as many pixels as channels": (lambda: trunk(("pred", linear(8, 8))), ["pred"]),
    "SAM": (
        lambda: trunk(("iou", holder("MLP", proj_in=linear(8, 8), proj_out=linear(8, 4)))),
        ["iou.proj_out"],
    ),
    "before a norm": (lambda: trunk(("neck", linear(8, 6)), ("end", nn.LayerNorm(6))), ["neck"]),
    "upsampled": (lambda: trunk(("mask", nn.ConvTranspose2d(8, 3, 2))), ["mask"]),
    "behind a hidden layer": (
        lambda: trunk(("top", nn.Sequential(nn.LayerNorm(8), linear(8, 16), linear(16, 40)))),
        ["top.2"],
    ),
    "adapted": (
        lambda: trunk(
            (
                "final",
                holder(
                    base_layer=linear(8, 50),
                    lora_A=nn.ModuleDict({"default": linear(8, 2)}),
                    lora_B=nn.ModuleDict({"default": linear(2, 50)}),
                ),
            )
        ),
        ["final.base_layer", "final.lora_B.default"],
    ),
    "of an auxiliary loss, before layers": (
        lambda: holder(stem=linear(8, 8), auxiliary=linear(8, 5), body=MLP(8, 8), end=linear(8, 5)),
        ["auxiliary", "end"],
    ),
    "without layers in a list": (
        lambda: nn.Sequential(nn.Flatten(), linear(12, 6), nn.ReLU(), linear(6, 10)),
        ["3"],
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_head_is_what_no_later_layer_takes(name: str) -> None:
    build, heads = ENDINGS[name]
    rows = split_parameters(build()).rows
    ends = [row.name.removesuffix(".weight") for row in rows if row.reason.endswith("a head")]
    assert ends == heads
    assert all(r.rule == "spectral" for r in rows if len(r.shape) > 1 and "a head" not in r.reason)


def tasks(m: Any, x: Tensor, task: str) -> Tensor:
    return forecast(m, x) if task == "forecast" else forecast(m, -x)


def forecast(m: Any, x: Tensor) -> Tensor:
    for block in m.blocks:
        x = block(m.enter(x))
    return m.out(x)


@pytest.mark.parametrize("order", [("enter", "blocks", "out"), ("blocks", "out", "enter")])
def test_layers_that_run_before_a_head_do_not_use_its_outputs(order: tuple[str, ...]) -> None:
    """A model may predict as many numbers as it reads, for one of several tasks."""
    members = {"enter": linear(5, 8), "blocks": nn.ModuleList([Block()]), "out": linear(8, 5)}
    for forward in (tasks, lambda m, x: m.out(m.blocks[0](m.enter(x)))):
        model = holder("Forecaster", forward, **{name: members[name] for name in order})
        if forward is tasks or order[-1] == "enter":
            with pytest.raises(
                ValueError, match="^out.weight could be an output head or a single matrix"
            ):
                split_parameters(model)
        else:
            assert split_parameters(model).rows[-1].rule == "adamw"


def test_a_linear_layer_named_like_a_norm_uses_outputs() -> None:
    layer = type("NormedLinear", (nn.Linear,), {})(6, 8, bias=False)
    model = holder(a=linear(8, 6), b=layer, blocks=nn.ModuleList([Block()]), out=linear(8, 3))
    rows = {row.name: row.rule for row in split_parameters(model).rows}
    assert (rows["a.weight"], rows["b.weight"], rows["out.weight"]) == ("spectral",) * 2 + (
        "adamw",
    )


def test_a_layer_in_a_head_with_a_weight_is_a_matrix() -> None:
    """The head multiplies by a tied embedding after a dense layer, as in ESM."""
    head = holder("Head", dense=linear(8, 8), norm=nn.LayerNorm(8), weight=parameter(30, 8))
    embedding = nn.Embedding(30, 8)
    head.weight = embedding.weight
    model = holder(embedding=embedding, blocks=nn.ModuleList([Block()]), lm_head=head)
    rows = {row.name: row.rule for row in split_parameters(model).rows}
    assert (rows["lm_head.dense.weight"], rows["embedding.weight"]) == ("spectral", "adamw")


def test_an_unknown_layer_named_like_an_embedding_is_no_table() -> None:
    layer = holder("Dense", weight=parameter(32, 32))
    model = trunk(emb_linear=layer, out=linear(32, 32))
    rows = {row.name: row.rule for row in split_parameters(model).rows}
    assert rows["blocks.0.emb_linear.weight"] == "spectral"
    table = trunk(token_embedding=holder("TokenEmbedding", weight=parameter(50, 8)))
    rows = {row.name: row.rule for row in split_parameters(table).rows}
    assert rows["blocks.0.token_embedding.weight"] == "adamw"


def test_a_query_of_a_separable_convolution_is_divided_by_heads() -> None:
    separable = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1))
    model = holder(heads=4, to_q=holder(net=separable))
    rows = {row.name: (row.matrices, row.rule) for row in split_parameters(model).rows}
    assert rows["to_q.net.1.weight"] == (4, "spectral") and rows["to_q.net.0.weight"][1] == "adamw"


def test_a_layer_that_is_called_a_head_and_has_a_later_one_is_no_head() -> None:
    """Examples are `conv_head` of MobileNet, and the hidden layer of a BERT-like head."""
    top = {"conv_head": nn.Conv2d(8, 20, 1), "classifier": linear(20, 5)}
    inner = {"lm_head": holder(dense=linear(8, 8), norm=nn.LayerNorm(8)), "decoder": linear(8, 40)}
    cases = ((top, "conv_head", "classifier"), (inner, "lm_head.dense", "decoder"))
    for heads, hidden, head in cases:
        rows = {row.name: row.rule for row in split_parameters(trunk(*heads.items())).rows}
        assert (rows[f"{hidden}.weight"], rows[f"{head}.weight"]) == ("spectral", "adamw")


def coupled(m: Any, x: Tensor) -> Any:
    a, b = x.chunk(2, -1)
    scale, shift = m.both(m.first(a)).chunk(2, -1)
    return m.out(torch.cat([a, b * scale + shift], -1))


def test_halves_of_the_size_of_the_next_layer_are_refused() -> None:
    """A flow has as many scales and shifts as the next layer has inputs."""
    sizes = {"first": (4, 8), "both": (8, 8), "out": (8, 8)}
    layers: Any = {name: linear(*pair) for name, pair in sizes.items()}
    flow = holder("Flow", coupled, **layers)
    model = nn.Sequential(flow, copy.deepcopy(flow), linear(8, 4))
    with pytest.raises(ValueError, match="^0.both.weight looks like .*Flow splits channels"):
        split_parameters(model, units={"*.first.weight": {}})
    units = {"*.first.weight": {}, "*.both.weight": {"rows": [4]}}
    rows = split_parameters(model, units=units).rows
    assert [row.rule for row in rows] == ["spectral"] * 6 + ["adamw"]


@pytest.mark.parametrize("body", [nn.LSTMCell(6, 4), nn.GRU(6, 4)])
def test_the_only_linear_layer_after_another_module_is_a_head(body: nn.Module) -> None:
    *_, head = [r for r in split_parameters(holder(body=body, out=linear(4, 3))).rows]
    assert (head.name, head.rule) == ("out.weight", "adamw")


def test_one_output_a_head_is_a_gate() -> None:
    """An example is a gated delta network; other layers of this size may be position biases, as in
    Swin v2."""
    attention = holder("Attention", num_v_heads=4, gate=linear(8, 4))
    rows = {row.name: row.rule for row in split_parameters(trunk(attention=attention)).rows}
    assert rows["blocks.0.attention.gate.weight"] == "spectral"
    positions = nn.Sequential(linear(2, 16), nn.ReLU(), linear(16, 4))
    with pytest.raises(ValueError, match=r"bias.2.weight .*no layer uses its 4 outputs"):
        split_parameters(trunk(attention=holder("Attention", num_v_heads=4, bias=positions)))


@pytest.mark.parametrize(
    "model",
    [
        trunk(offsets=linear(8, 20)),  # of deformable attention
        trunk(shared_keys=linear(8, 2)),
        trunk(("shift_and_scale", linear(8, 16)), ("last", linear(8, 3))),
        trunk(("boxes", nn.ModuleList([MLP(8, 8, 5), MLP(8, 8, 5)]))),
        holder(context=linear(8, 10), update=Block(), mix=linear(13, 8)),  # 10 of 13 inputs
        trunk(("patches_out", linear(8, 16)), ("smooth", nn.Conv2d(4, 4, 3))),  # U-ViT
    ],
)
def test_outputs_of_a_size_that_no_layer_has_are_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"no layer uses its.*example=.*elementwise"):
        split_parameters(model)


def test_the_last_layer_of_a_model_without_others_like_it_is_said_to_be_a_guess() -> None:
    rows = split_parameters(nn.Sequential(linear(8, 16), nn.ReLU(), linear(16, 8))).rows
    assert [r.reason for r in rows] == ["one matrix", "one matrix, unless it is a head"]


def test_a_layer_of_few_outputs_that_the_next_takes_is_a_matrix() -> None:
    model = trunk(squeeze=nn.Conv2d(8, 2, 1), expand=nn.Conv2d(2, 8, 1))
    assert {row.rule for row in split_parameters(model).rows if len(row.shape) > 1} == {"spectral"}
