"""Results of `split_parameters` without an example, for each kind of weight.

Every result is compared with plain slices of the weight: a step of the weight equals the steps of
the slices, each of which is a parameter of its own optimizer.
"""

import copy
import functools
import operator
import warnings
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import triton
from safetensors import serialize
from torch import Tensor, nn
from torch.nn import functional as F

from spectral import Muon, split_parameters
from tests.modules import linear, module

Pieces = Callable[[Tensor], list[Tensor]]


def grouped_linear(inputs: int, outputs: int, groups: int) -> nn.Module:
    """A layer that applies one part of its weight to each group of inputs."""
    layer = type("GroupedLinear", (nn.Linear,), {})(inputs, outputs, bias=False)
    layer.n_groups = groups
    return layer


def named(names: str = "q_proj k_proj v_proj o_proj", make: Any = linear, **says: Any) -> nn.Module:
    """An attention module with layers of the given names and with the attributes `says`."""
    return module("Attention:", **{name: make(8, 8) for name in names.split()}, **says)


def experts(layers: str, **members: Any) -> nn.Module:
    return module("Moe:", experts=module(layers, **members))


def rows(*sizes: int) -> Pieces:
    """Return a function that slices a weight into pieces with the given numbers of rows."""
    return lambda w: [*w.flatten(1).split(sizes[0] if len(sizes) == 1 else sizes)]


def whole(weight: Tensor) -> list[Tensor]:
    return [weight.flatten(1)]


def adapter(inputs: int, outputs: int) -> nn.Module:
    """An adapter on a frozen layer, as built by peft and torchtune."""
    return module(
        "Linear:",
        base_layer=linear(inputs, outputs).requires_grad_(False),
        lora_A=nn.ModuleDict({"default": linear(inputs, 2)}),
        lora_B=nn.ModuleDict({"default": linear(2, outputs)}),
    )


def adapted() -> nn.Module:
    return module("Attention:", qkv_proj=adapter(8, 24), num_heads=2, out=linear(8, 8))


def hooked(hook: Any) -> nn.Module:
    attention: Any = named(num_heads=2)
    hook(attention.q_proj)
    return attention


def weight_norm(layer: nn.Module) -> nn.Module:
    """Apply the weight norm hook of torch.nn.utils, which is deprecated but still used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


class Block(nn.Module):
    """A layer of a model."""

    def __init__(self, **members: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), linear(8, 32), linear(32, 8)
        for name, member in members.items():
            setattr(self, name, member)


class MLP(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(*pair) for pair in pairwise(sizes))


def blocks(count: int = 2, **members: nn.Module) -> nn.ModuleList:
    return nn.ModuleList(Block(**members) for _ in range(count))


def trunk(block: dict[str, nn.Module] | None = None, **heads: nn.Module) -> nn.Module:
    """A model of two layers that contain `block`, followed by heads."""
    layers = blocks(**(block or {}))
    return module(patches=nn.Conv2d(3, 8, 2), blocks=layers, norm=nn.LayerNorm(8), **heads)


torch.manual_seed(0)  # for the weights of the cases below
GATED_DELTA = {"num_k_heads": 2, "head_k_dim": 2, "num_v_heads": 2, "head_v_dim": 3}
PATCHES = nn.Sequential(
    module("Merge:", norm=nn.LayerNorm(16), reduction=linear(16, 8)),
    module("Block:", norm=nn.LayerNorm(8), fc1=linear(8, 32), fc2=linear(32, 8)),
    linear(8, 3),
)
CASES: dict[str, tuple[nn.Module, str, Pieces]] = {
    # Groups of convolutions
    "grouped": (nn.Conv1d(8, 12, 3, groups=2), "weight", rows(6)),
    "depthwise with several outputs": (nn.Conv1d(4, 8, 3, groups=4), "weight", rows(2)),
    "grouped and transposed": (
        nn.ConvTranspose1d(8, 12, 3, groups=2),
        "weight",
        lambda w: [part.transpose(0, 1).flatten(1) for part in w.chunk(2)],
    ),
    "transposed": (nn.ConvTranspose2d(4, 2, 2), "weight", lambda w: whole(w.transpose(0, 1))),
    "convolution": (nn.Conv3d(3, 5, 2), "weight", whole),
    "keys of a linear attention": (named("q_proj", head_k_dim=2, head_v_dim=4), "q_proj", rows(2)),
    "project_q": (named("project_q", dim_head=4), "project_q", rows(4)),
    "a forget gate of heads": (named("f_b_proj", head_dim=2), "f_b_proj", rows(2)),
    "groups": (module("Attention:", o_a_proj=grouped_linear(4, 12, 3)), "o_a_proj", rows(4)),
    # Heads, by their own size
    "q by head_dim": (named(head_dim=4, v_head_dim=2), "q_proj", rows(4)),
    "v of its own size": (named(head_dim=4, v_head_dim=2), "v_proj", rows(2)),
    "k of latent attention": (named(qk_head_dim=2, v_head_dim=4, head_dim=1), "k_proj", rows(2)),
    "by their number": (named(num_attention_heads=4), "v_proj", rows(2)),
    "by the number of keys": (named(num_heads=4, num_kv_heads=2), "k_proj", rows(4)),
    "BERT": (named("query key value", attention_head_size=2), "query", rows(2)),
    "T5": (named("q k v o", key_value_proj_dim=4), "k", rows(4)),
    "diffusers": (named("to_q to_k to_v", heads=2), "to_v", rows(4)),
    "DistilBERT": (named("q_lin k_lin v_lin", n_heads=2), "q_lin", rows(4)),
    "Conformer": (named("linear_q linear_k", head_dim=2), "linear_k", rows(2)),
    "one head": (named(num_heads=1), "q_proj", whole),
    "a projection before layers that the model names first": (
        module("", lambda m, x: m.blocks[0](m.enter(x)), blocks=blocks(), enter=linear(8, 8)),
        "enter",
        whole,
    ),
    "convolutions": (named(make=lambda i, o: nn.Conv2d(i, o, 1), heads=2), "q_proj", rows(4)),
    "qkv of a number": (module("Attention: qkv 8 24, proj 8 8", num_heads=4), "qkv", rows(2)),
    "fewer keys": (module("A: Wqkv 8 16", num_heads=4, num_key_value_heads=2), "Wqkv", rows(2)),
    "kv": (module("A: to_kv 8 16", heads=2), "to_kv", rows(4)),
    "qkv in a sequence": (
        module("A:", qkv=nn.Sequential(nn.Conv2d(8, 24, 1), nn.ReLU()), num_heads=2),
        "qkv.0",
        rows(4),
    ),
    "indexer": (module("Indexer: wq_b 6 8", n_heads=4, head_dim=2), "wq_b", rows(2)),
    "gated delta network": (
        module("Net: in_proj_qkv 6 14, in_proj_z 6 6", **GATED_DELTA),
        "in_proj_qkv",
        rows(2, 2, 2, 2, 3, 3),
    ),
    "its gate": (
        module("Net: in_proj_z 6 6", norm=nn.LayerNorm(3), out=linear(6, 6)),
        "in_proj_z",
        whole,
    ),
    "latent and rotary": (
        module("A: kv_a_proj_with_mqa 6 10", kv_lora_rank=8, qk_rope_head_dim=2),
        "kv_a_proj_with_mqa",
        rows(8, 2),
    ),
    "Mamba": (
        module("Mixer: x_proj 8 7", time_step_rank=3, ssm_state_size=2),
        "x_proj",
        rows(3, 2, 2),
    ),
    # Names behind hooks, wrappers and adapters
    "weight_norm": (hooked(weight_norm), "q_proj.weight_v", rows(4)),
    "spectral_norm": (hooked(nn.utils.spectral_norm), "q_proj.weight_orig", rows(4)),
    "parametrized": (
        hooked(nn.utils.parametrizations.weight_norm),
        "q_proj.parametrizations.weight.original1",
        rows(4),
    ),
    "wrapped": (
        module("A:", q_proj=module("Clipped: linear 8 8"), num_heads=2),
        "q_proj.linear",
        rows(4),
    ),
    "adapter's outputs": (adapted(), "qkv_proj.lora_B.default", rows(4)),
    "adapter's inputs": (adapted(), "qkv_proj.lora_A.default", whole),
    # Recurrent layers
    "LSTM": (nn.LSTM(3, 4), "weight_ih_l0", rows(4)),
    "GRU": (nn.GRUCell(3, 4), "weight_hh", rows(4)),
    "LSTM's projection": (nn.LSTM(3, 4, proj_size=2), "weight_hr_l0", whole),
    # Experts
    "experts of a layout": (
        experts("AnyExperts: gate_up_proj 2x10x6, down_proj 2x6x5", is_transposed=False),
        "experts.gate_up_proj",
        lambda w: [m for e in w for m in e.split(5)],
    ),
    "experts [in, out]": (
        experts("QwenMoeTextExperts: gate_up_proj 2x6x10, down_proj 2x5x6", is_transposed=True),
        "experts.gate_up_proj",
        lambda w: [m.T for e in w for m in e.split(5, dim=1)],
    ),
    "experts' outputs": (
        experts("AnyExperts: down_proj 2x5x6", is_transposed=True),
        "experts.down_proj",
        lambda w: [e.T for e in w],
    ),
    "interleaved experts": (
        experts(
            "AnyExperts: gate_up_proj 2x6x10, gate_up_proj_bias 2x10, down_proj 2x5x6",
            is_transposed=True,
            is_concatenated=False,
        ),
        "experts.gate_up_proj",
        lambda w: [e[:, j::2].T for e in w for j in (0, 1)],
    ),
    # Weights that are plainly one matrix
    "feed-forward": (module("Mlp: fc1 8 32, fc2 32 8"), "fc1", whole),
    "merge of patches": (PATCHES, "0.reduction", whole),
    "a norm in its class": (module(mixed=module("LayerNormLinear: weight 6x4")), "mixed", whole),
    "below an embedding": (
        module(embed_tokens_extend=module("encoder 4 4")),
        "embed_tokens_extend.encoder",
        whole,
    ),
}


def by_name(model: nn.Module, **options: Any) -> dict[str, Any]:
    """Return the rows of a split, keyed by parameter name without ".weight"."""
    rows = split_parameters(model, **options).rows
    return {row.name.removesuffix(".weight"): row for row in rows}


def rules(model: nn.Module, **options: Any) -> dict[str, str]:
    """Return the rule of each weight with at least two dimensions."""
    return {n: row.rule for n, row in by_name(model, **options).items() if len(row.shape) > 1}


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_the_steps_of_the_pieces(name: str) -> None:
    model, weight, pieces = CASES[name]
    model = module(blocks=nn.ModuleList([model])).double()
    weight = f"blocks.0.{weight}".removesuffix(".weight")
    p = {n.removesuffix(".weight"): p for n, p in model.named_parameters()}[weight]
    row = by_name(model)[weight]
    # Slices that coincide with one matrix would not detect a division.
    assert (row.rule, row.matrices) == ("spectral", len(pieces(p.detach())))
    optimizer = Muon(split_parameters(model), lr=0.1, weight_decay=0.0)
    before, p.grad = p.detach().clone(), torch.randn_like(p)
    optimizer.step()
    for start, gradient, end in zip(*map(pieces, (before, p.grad, p.detach())), strict=True):
        piece = nn.Parameter(start.clone())
        piece.grad = gradient.clone()
        Muon([piece], lr=0.1, weight_decay=0.0).step()
        difference = (end - piece).norm() / (piece - start).norm()
        assert difference < 1e-5, "the rounding of the products, whose order differs"


def named_head(getter: str = "get_classifier", head: nn.Module | None = None) -> nn.Module:
    """A model inside another model, with a method that returns its head."""
    model: Any = type("Named", (nn.Module,), {getter: lambda self: self.out})()
    model.out = head or linear(6, 9)
    return module(backbone=model, neck=linear(6, 7))


SAVED = module(
    original_module=linear(8, 2).requires_grad_(False),
    modules_to_save=nn.ModuleDict({"default": linear(8, 2)}),
)
TOP = nn.Sequential(linear(6, 6), nn.ReLU(), linear(6, 9))
PAIR = {"a": linear(6, 9), "b": linear(6, 2)}
ELEMENTWISE: dict[str, tuple[nn.Module, str]] = {
    "depthwise": (nn.Conv1d(64, 64, 4, groups=64), ""),
    "router": (module("gate 6 3", experts=nn.ModuleList([linear(6, 6)])), "gate"),
    "torchtitan's": (module(router=module("R: gate 6 3"), experts=module("w 6 6")), "router.gate"),
    "router in a class": (
        module(gate=module("TopKRouter: weight 3x6"), experts=linear(6, 6)),
        "gate",
    ),
    "JetMoe's": (
        module(router=module("TopKGating: layer 6 3"), mlp=module("ParallelExperts: w 6 6")),
        "router.layer",
    ),
    "relative positions": (module("rel_pos_h 7x4"), "rel_pos_h"),
    "attention biases": (module("attention_biases 4x49"), "attention_biases"),
    "latents": (module("latents 6x8"), "latents"),
    "queries": (module("query_tokens 1x6x8"), "query_tokens"),
    "prompts": (module(p=module("prompt_embeddings 6x8")), "p.prompt_embeddings"),
    "a magnitude": (weight_norm(nn.Linear(5, 5)), "weight_g"),
    "head": (trunk(unembed=linear(8, 9)), "unembed"),
    "head that was saved": (trunk(score=SAVED), "score.modules_to_save.default"),
    "head of a classifier": (
        trunk(classifier=nn.Sequential(linear(8, 8), nn.ReLU(), linear(8, 9))),
        "classifier.2",
    ),
    "head that timm names": (named_head(), "backbone.out"),
    "head that transformers name": (named_head("get_output_embeddings"), "backbone.out"),
    "last of the layers of a named head": (named_head(head=TOP), "backbone.out.2"),
    "heads in a named list": (named_head(head=nn.ModuleList(PAIR.values())), "backbone.out.0"),
    "heads in a named mapping": (named_head(head=nn.ModuleDict(PAIR)), "backbone.out.a"),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_is_no_matrix_goes_to_adamw(name: str) -> None:
    model, weight = ELEMENTWISE[name]
    rows = by_name(module(other=blocks(), model=model))
    assert rows[f"model.{weight}".removesuffix(".")].rule == "adamw"
    assert {rows["other.0.up"].rule, rows["other.0.down"].rule} == {"spectral"}


def test_inner_layers_of_a_named_head_are_matrices() -> None:
    found = rules(named_head(head=TOP))
    assert (found["backbone.out.0"], found["backbone.out.2"]) == ("spectral", "adamw")


def parts(forward: Any) -> nn.Module:
    """Two convolutions, each on half of the channels, as in SKNet and ShuffleNet."""
    return module("Parts:", forward, a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 4, 3, padding=1))


def chunked(m: Any, x: Tensor) -> list[Tensor]:
    a, b = x.chunk(2, 1)
    return [m.a(a), m.b(b)]


def joined(m: Any, x: Tensor) -> Tensor:
    return torch.cat(both(m, x), 1)


def both(m: Any, x: Tensor) -> list[Tensor]:
    return [m.a(x.split(4, 1)[0]), m.b(x.split(4, 1)[1])]


def wrapped(inner: nn.Module) -> nn.Module:
    """Replace the forward method of a module with another function, as the hooks of accelerate
    do."""
    forward = inner.forward
    inner.forward = functools.wraps(forward)(lambda *arguments: forward(*arguments))
    return inner


def first_half(x: Tensor) -> Tensor:
    return x[:, :4]


def ghost(forward: Any) -> nn.Module:
    """A layer on half of the channels, as in GhostNet."""
    return module("Ghost:", forward, b=nn.Conv2d(4, 8, 1))


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 1), *layers, nn.Conv2d(8, 4, 1))


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mixed = F.scaled_dot_product_attention(heads_of(q), heads_of(k), heads_of(v))
    return mixed.transpose(1, 2).flatten(2)


def unprojected(m: Any, x: Tensor) -> Tensor:
    return attend(m.norm(x), m.norm(x), m.norm(x))


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


def normed(m: Any, x: Tensor) -> Tensor:
    q = m.norm(heads_of(x))
    return F.scaled_dot_product_attention(q, q, heads_of(x)).transpose(1, 2).flatten(2)


def hypermixed(m: Any, x: Tensor) -> Tensor:
    """Mix tokens in each head of the inputs with generated weights."""
    tokens = x.mT.reshape(2 * len(x), 4, -1)
    return (tokens @ m.make(x).reshape(2 * len(x), -1, 4) @ tokens).reshape(x.shape)


def mixing(layers: str, forward: Any, **members: Any) -> nn.Module:
    """A model in which module `mix` divides the outputs of layer `enter.layers.0` into heads."""
    return module(enter=MLP(8, 8), mix=module(layers, forward, **members), out=linear(8, 3))


HEADS = "enter.layers.0.weight: looks like .*Core may divide its inputs into heads"
INDIVISIBLE = "weight: looks like .*heads of Attention do not divide the weight's"
UNCLEAR = "weight: could be an output head or a single matrix:"
PROJECTION = "mixed.weight: looks like .*attention module also projects heads"
SPLITS = "stem.weight: looks like .*Parts splits channels"
ADAPTER = module("lora_a 8 2, lora_b 2 24")
GRAPH = module("Graph: weight 8x8", lambda m, x, edges: edges @ (x @ m.weight))
UNKNOWN: dict[str, tuple[nn.Module, str]] = {
    "gate in a module of its own": (
        module(net=nn.Sequential(module("proj 8 24"), nn.Dropout(), linear(12, 8))),
        "net.0.proj.weight: looks like .*no layer uses its 24 outputs",
    ),
    "a gate as wide as the last layer's outputs": (
        nn.Sequential(module("Gate: proj 10 24", lambda m, x: F.glu(m.proj(x))), linear(12, 24)),
        "0.proj.weight: looks like .*Gate splits channels",
    ),
    "convolutional qkv": (
        module(to_qkv=nn.Conv2d(16, 48, 1), to_out=nn.Conv2d(16, 16, 1)),
        "to_qkv.weight: looks like .*its name is to_qkv",
    ),
    "nine chunks in a block": (
        module(norm=module("linear 8 72"), attn=named(num_heads=2)),
        "norm.linear.weight: looks like .*uses its 72",
    ),
    **{
        f"branches that take parts: {case}": (
            module(stem=nn.Conv2d(3, 8, 1), block=block, out=nn.Conv2d(8, 4, 1)),
            SPLITS,
        )
        for case, block in {
            "chunks": parts(chunked),
            "wrapped": wrapped(parts(chunked)),
            "a function": parts(joined),
        }.items()
    },
    "heads in groups": (
        module(to_qkv=nn.Conv1d(24, 24, 1, groups=3), out=nn.Conv1d(8, 8, 1)),
        "to_qkv.weight: may contain several heads in each group",
    ),
    "heads that a bare parameter shows": (
        module(gat=module("w 8 12, source 1x3x4, target 1x3x4"), out=linear(12, 4)),
        "gat.w.weight: looks like .*source arranges its 12 outputs along 2 axes",
    ),
    "joined outputs": (
        nn.Sequential(nn.Conv2d(16, 8, 3), nn.Conv2d(24, 8, 3), nn.Conv2d(32, 16, 1)),
        "0.weight: looks like .*uses its 8",
    ),
    "pixels": (
        nn.Sequential(nn.Conv2d(4, 16, 3), nn.PixelShuffle(2), nn.Conv2d(4, 3, 3)),
        "0.weight: looks like .*uses its 16",
    ),
    "a projection without heads": (named(), "q_proj.weight: looks like .*its name is q_proj"),
    "another layer of attention": (named("q_proj k_proj mixed o_proj", num_heads=2), PROJECTION),
    "a convolution of keys that queries scale": (
        named("query key value key_conv_attn_layer", num_heads=2),
        PROJECTION.replace("mixed", "key_conv_attn_layer"),
    ),
    "unequal parts": (
        module("inner 8 7, rank 3 8, out 8 8"),
        "inner.weight: looks like .*uses its 7",
    ),
    "heads that do not divide": (named(head_dim=3), f"q_proj.{INDIVISIBLE} 8"),
    "queries narrower than heads": (named(head_dim=4, num_heads=4), f"q_proj.{INDIVISIBLE} 8"),
    "keys next to such queries": (
        named("k_proj v_proj q_proj", head_dim=4, num_heads=4),
        f"k_proj.{INDIVISIBLE} 8",
    ),
    "values of several vectors per head": (
        named("q_proj v_proj", head_dim=2, num_heads=2, num_kv_heads=1),
        f"v_proj.{INDIVISIBLE} 8",
    ),
    "values wider than heads": (
        module("Attention: v_proj 8 16", head_dim=4, num_heads=2),
        f"v_proj.{INDIVISIBLE} 16",
    ),
    "fused heads of other sizes": (
        module("Attention: qkv 8 48", num_heads=2, key_dim=4, val_dim=16),
        f"qkv.{INDIVISIBLE} 48 outputs",
    ),
    "values of another size": (
        module("qkv 8 24", head_dim=4, v_head_dim=2),
        "qkv.weight: looks like",
    ),
    "adapter of a fused weight": (
        module(gate_in=ADAPTER, o=linear(12, 8)),
        "gate_in.lora_b.weight: looks like .*uses its 24",
    ),
    "spectral_norm": (
        module(wi=nn.utils.spectral_norm(linear(8, 24)), wo=linear(12, 8)),
        "wi.weight_orig: looks like .*uses its 24",
    ),
    "experts that state no layout": (
        experts("TextExperts: gate_up_proj 2x6x10, down_proj 2x5x6"),
        r"gate_up_proj: has shape \(2, 6, 10\), and its two matrix axes are unknown",
    ),
    "experts of an odd size": (
        experts("AnyExperts: gate_up_proj 2x9x6, down_proj 2x6x5", is_transposed=False),
        "gate_up_proj: must have an even number of rows, got 9",
    ),
    "three dimensions": (module("kernel 3x4x5"), "kernel: has shape"),
    "queries that multiply tokens": (module("queries 4x6"), "its name is queries"),
    "experts in attention": (
        module(mix=module("Mixture:", experts=module("weight 3x8x6"), gate=linear(6, 3))),
        "and its two matrix axes are unknown",
    ),
    "focal modulation": (
        module("projection_in 8 19, projection_out 8 8"),
        "projection_in.weight: looks like several matrices",
    ),
    "a size that the config alone says": (
        module("Conv: in_proj 8 12", config=module(intermediate_size=6)),
        "in_proj.weight: looks like several matrices",
    ),
    "a bare weight": (module("real_weight 4x6"), "may be rows or columns"),
    "a stack of one": (module("fc_weights 1x4x6"), "and its two matrix axes are unknown"),
    "tokens or a stack of one": (module("thing 1x6x8"), "and its two matrix axes are unknown"),
    "a stack of relations": (module("rel 4x8x8"), "and its two matrix axes are unknown"),
    "a product with a weight": (
        module(first=GRAPH, second=copy.deepcopy(GRAPH)),
        r"(?s)first.weight: .*may be rows.*second.weight: .*may be rows",
    ),
    # What the forward pass does with the outputs
    "projections of two towers": (
        module(
            "Clip:",
            lambda m, a: m.text(m.trunk(a)) @ m.image(a).mT,
            **{"trunk": trunk(), "text": linear(8, 6), "image": linear(8, 6)},
        ),
        f"text.{UNCLEAR} Clip adds or multiplies",
    ),
    "a last layer that is added": (
        trunk(pool=module("Pool:", lambda m, x: x + m.mlp(x), mlp=MLP(8, 24, 8))),
        f"mlp.layers.1.{UNCLEAR} Pool adds",
    ),
    "a pooler before other blocks": (
        module(tower=trunk(pooler=linear(8, 8)), more=blocks()),
        f"tower.pooler.{UNCLEAR} other blocks run after",
    ),
    "a pooler beside a tower and a layer that takes no pooled outputs": (
        module(tower=trunk(pooler=linear(8, 8)), neck=linear(8, 8), more=blocks(1)),
        f"tower.pooler.{UNCLEAR} other blocks run after",
    ),
    "a projection of a tower before another tower": (
        module(
            "Clip:",
            lambda m, a, b: m.text(a) @ m.image(b).mT,
            text=trunk(end=linear(8, 8)),
            image=trunk(end=linear(8, 8)),
        ),
        f"text.end.{UNCLEAR} other blocks run after",
    ),
    "a last layer of an encoder before a decoder": (
        module(encoder=trunk(end=linear(8, 8)), decoder=blocks(1)),
        f"encoder.end.{UNCLEAR} other blocks run after",
    ),
    "a layer between blocks that the blocks may not take": (
        module(first=blocks(1), auxiliary=linear(8, 8), second=blocks(1)),
        f"auxiliary.{UNCLEAR} other blocks run after",
    ),
    "a first layer, whose outputs are joined": (
        module("enter 16 4", blocks=blocks()),
        "enter.weight: looks like .*uses its 4",
    ),
    "a last layer of gates": (
        module(
            cell=module("Cell: g 8 32", lambda m, h: m.norm(m.g(h)).chunk(4, -1)), up=linear(32, 8)
        ),
        "cell.g.weight: looks like .*Cell splits channels",
    ),
    "values of heads that are joined": (
        module(
            "Diff: v_proj 8 8",
            lambda m, x: torch.cat(torch.chunk(m.v_proj(x).view(2, 4, -1), 2), -1),
            num_heads=2,
        ),
        "v_proj.weight: looks like .*heads of Diff .* or are concatenated",
    ),
    "queries beside a token that no layer projects": (
        module(
            "Attention:",
            to_q=module("Conv: net 8 8", lambda m, x: torch.cat([x[:1], m.net(x)])),
            heads=2,
        ),
        "to_q.net.weight: looks like .*heads of Attention .* or are concatenated",
    ),
    "channels that a slice takes apart": (
        images(ghost(lambda m, x: m.b(x[:, :4]))),
        "0.weight: looks like .*Ghost splits channels",
    ),
    "channels that a function takes apart": (
        images(ghost(lambda m, x: m.b(first_half(x)))),
        "0.weight: looks like .*Ghost splits channels",
    ),
    "the only matrix, which holds the gates of a cell": (
        module("Cell: gates 12 32, out 8 1", lambda m, h: m.out(m.gates(h).chunk(4, -1)[0])),
        "gates.weight: looks like .*Cell splits channels",
    ),
    "outputs of several pixels": (
        nn.Sequential(
            module("Merge:", down=nn.Conv2d(32, 8, 1)),
            module("Split:", lambda m, x: F.pixel_shuffle(m.up(x), 2), up=nn.Conv2d(8, 32, 1)),
            nn.Conv2d(8, 4, 1),
        ),
        "1.up.weight: looks like .*Split splits channels",
    ),
    # Heads of the outputs of an earlier layer
    "tokens that generated layers mix by heads": (
        mixing("Mixing:", hypermixed, make=nn.LayerNorm(8)),
        HEADS.replace("Core", "Mixing"),
    ),
    "attention whose values no layer projects": (
        mixing("Core:", unprojected, norm=nn.LayerNorm(8)),
        HEADS,
    ),
    "values that are inputs": (mixing("Core: q 8 8, k 8 8", scored, heads=2), HEADS),
    "heads of inputs that are projected one by one": (
        mixing("Core: q_proj 4 4, k_proj 4 4, v_proj 4 4, out 8 8", per_head, head_dim=4),
        HEADS,
    ),
    "inputs as queries, fused keys": (mixing("Core: qkv 8 16", queried, head_dim=4), HEADS),
    "inputs as queries, a layer of keys": (mixing("Core: kv 8 16", queried, heads=2), HEADS),
    "queries of a parameter and values that are inputs": (
        mixing("Core: query_tokens 3x4", pooled, norm=nn.LayerNorm(8)),
        HEADS,
    ),
    "keys narrower than queries": (
        module("A: to_q 8 8, to_kv 8 4", heads=4),
        "to_kv.weight: looks like .*: the heads of A",
    ),
    "a projection that may be [in, out]": (
        module("A: proj_k 16x4", head_dim=4),
        "proj_k: looks like .*its name is proj_k",
    ),
    "a layer whose transpose is a later layer": (
        module(
            "Tied: up 8 6, down 6 4",
            lambda m, x: F.linear(m.down(m.up(x)), m.down.weight.t()),
        ),
        "down.weight: could be an output head .*: Tied also uses its weight directly",
    ),
    "a layer before a weight of another layer": (
        module(
            "Tied:",
            lambda m, x: F.linear(m.up(m.down(m.table(x))), m.table.weight),
            table=nn.Embedding(20, 8),
            blocks=blocks(),
            down=linear(8, 6),
            up=linear(6, 8),
        ),
        "up.weight: could be an output head .*: Tied adds or multiplies activations after it",
    ),
    "a gate that a norm and a wrapper hide": (
        module(
            "Gate: out 8 8",
            lambda m, x: m.out(operator.mul(*m.inner(x).chunk(2, -1))),
            inner=module("Inner: wide 8 16", lambda m, x: m.norm(m.wide(x)), norm=nn.LayerNorm(16)),
        ),
        "inner.wide.weight: looks like .*Gate splits channels",
    ),
    "a gate whose layers a wrapper contains": (
        module(
            "Gate: out 4 8",
            lambda m, x: m.out(operator.mul(*m.inner(x).chunk(2, -1))),
            inner=module("Inner:", lambda m, x: m.layers(x), layers=module("wide 8 8, last 8 8")),
        ),
        "inner.layers.last.weight: looks like .*Gate splits channels",
    ),
    "attention with a norm whose inputs other layers project": (
        mixing("Core:", normed, norm=nn.LayerNorm(4)),
        HEADS,
    ),
    "outputs that others join": (
        module(
            "first 12 8, side 8 5, other 8 3, end 8 2",
            lambda m, x: m.end(torch.cat([m.side(y := m.first(x)), m.other(y)], -1)),
        ),
        "side.weight: looks like .*no layer uses its 5 outputs",
    ),
    "outputs of the layer that a model names last": (
        module("end 13 3, last 8 5", lambda m, x: m.end(torch.cat([m.last(x), x], -1))),
        "last.weight: looks like .*no layer uses its 5 outputs",
    ),
    "a mix of heads": (
        module("Attend:", heads=4, pre=nn.Conv2d(4, 4, 1), post=nn.Conv2d(4, 4, 1)),
        "pre.weight: looks like .*it mixes the 4 heads",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_nothing_says_is_refused(name: str) -> None:
    model, message = UNKNOWN[name]
    with pytest.raises(ValueError, match=message) as error:
        split_parameters(model)
    advice = ["example=", "units=", "elementwise="]
    assert [word for word in advice if word in str(error.value)] == advice


def test_all_unclear_weights_are_in_one_error() -> None:
    names = [f"w{i}" for i in range(12)]
    bare = nn.ParameterDict({name: nn.Parameter(torch.ones(8, 8)) for name in names})
    with pytest.raises(
        ValueError, match="(?s)^2 x blocks.[*].qkv.weight: looks.*bare.w0: is"
    ) as error:
        layers = nn.ModuleList(Block(qkv=linear(8, 24)) for _ in range(2))
        split_parameters(module("Model:", blocks=layers, bare=bare))
    lines = str(error.value).splitlines()
    assert len(lines) == 16 and lines[10] == "... and 3 more"
    assert "example=" in lines[12] and "'blocks.0.qkv.weight'" in lines[13]


def test_a_list_may_have_places_without_a_module() -> None:
    layers: Any = [nn.ModuleList([None, linear(8, 6), linear(6, 8)]) for _ in range(2)]
    found = rules(module(layers=nn.ModuleList(layers), out=linear(8, 3)))
    assert [*found.values()] == ["spectral"] * 4 + ["adamw"]


def branch(forward: Any, inner: int = 8, **says: Any) -> nn.Module:
    """A layer with as many outputs as the model width, which are divided into halves or heads."""
    return module(f"Branch: wide 8 8, out {inner} 8", forward, **says)


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
    """A module that divides its inputs."""

    cut = staticmethod(gated)

    def __init__(self) -> None:
        super().__init__()
        self.out = linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(gated(x))


class Function(torch.autograd.Function):
    """A function with its own gradient."""

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
    """A Triton kernel, whose code must not be read."""


tuned = triton.autotune(configs=[triton.Config({})], key=[])(kernel)


def gated_halves(m: Any, x: Tensor) -> Tensor:
    y = m.wide(x)
    return torch.cat([y[:, :4] * y[:, 4:], x[:, 4:]], 1)


def not_imported(m: Any, x: Tensor) -> Tensor:
    from safetensors.flax import save

    return m.out(save(m.wide(x)))


class Scripted(torch.jit.ScriptModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = linear(8, 8), linear(4, 8)

    @torch.jit.script_method
    def forward(self, x: Tensor) -> Tensor:
        y, z = self.wide(x).chunk(2, -1)
        return self.out(y * z)


def inherited() -> nn.Module:
    """Return a module whose class calls the forward method of its base class."""
    base = type(branch(called(gated)))
    layer = branch(lambda m, x: super(type(layer), m).forward(x))
    layer.__class__ = type("Branch", (type(layer), base), {})
    return layer


def followed(*cuts: nn.Module) -> nn.Module:
    """A layer followed by modules that divide its outputs."""
    return nn.Sequential(OrderedDict(wide=linear(8, 8), **{f"c{i}": c for i, c in enumerate(cuts)}))


CONVOLUTIONS = {"wide": nn.Conv2d(8, 8, 1), "out": nn.Conv2d(8, 8, 1)}


@pytest.mark.parametrize(
    "layer",
    [
        branch(lambda m, x: m.out(F.glu(m.wide(x))), 4),
        branch(lambda m, x: m.out(m.wide(x)[..., :4] * m.wide(x)[..., 4:]), 4),
        branch(interleaved, 4),
        branch(heads),
        branch(heads_in_a_loop),
        branch(kept, 4, cut=functools.partial(torch.chunk, chunks=2, dim=-1)),
        branch(kept, 4, cut=lambda y: y.split(4, -1)),
        module("Branch:", positions, **CONVOLUTIONS),
        branch(lambda m, x: m.out(m.wide(x)[:, :, :4] * m.wide(x)[:, :, 4:]), 4),
        branch(lambda m, x: m.out(Gated.twice(m.wide(x)))),
        branch(lambda m, x: m.out(Function.apply(m.wide(x)))),
        branch(lambda m, x: m.out(m.cut(m.wide(x))), cut=Gated()),
        branch(called(functools.lru_cache(gated))),
        branch(called(lambda y: gated(y))),
        branch(called(torch.jit.script(gated))),
        branch(lambda m, x: m.out(GATED.once(m.wide(x)))),
        branch(lambda m, x, cut=gated: m.out(cut(m.wide(x)))),
        branch(lambda m, x: m.out(m.cut["gated"](m.wide(x))), cut={"gated": gated}),
        branch(lambda m, x: m.out(m.next.cut(m.wide(x))), next=Next()),
        branch(lambda m, x: m.out(m.wide(x).view(-1, 2, 4).select(1, 0).repeat(1, 2))),
        branch(lambda m, x: m.out(m.wide(x).index_select(1, m.places).repeat(1, 2))),
        branch(imported),
        inherited(),
        Scripted(),
        followed(Gated(), linear(8, 8)),
        # Functions of torch, whose code is not read.
        followed(nn.GLU(), linear(4, 8)),
        branch(kept, 4, cut=nn.Unflatten(-1, (2, 4))),
        followed(Next()),
        branch(lambda m, x: m.out(SPLIT(m.wide(x)))),
        branch(lambda m, x: m.out(serialize(m.wide(x)))),
        branch(lambda m, x: m.out(torch.ops.spectrain_tests.part(m.wide(x)))),
        branch(called(part)),
        branch(lambda m, x: kernel[(1,)](m.out(m.wide(x)))),
        branch(lambda m, x: tuned[(1,)](m.out(m.wide(x)))),
        branch(not_imported),
        module("Gate: wide 8 8", gated_halves),
    ],
)
def test_a_layer_that_fits_its_neighbour_and_may_be_cut_is_refused(layer: nn.Module) -> None:
    why = "(splits channels|calls code that cannot be read)"
    with pytest.raises(ValueError, match=f"1.wide.weight: looks like .*{why}"):
        split_parameters(nn.Sequential(linear(8, 8), layer, linear(8, 3)))


def test_slices_of_tokens_do_not_divide_a_layer() -> None:
    shift = module("Shift: wide 8 8", lambda m, x: x[:, 1:] + m.wide(x)[:, :-1])
    found = by_name(nn.Sequential(linear(8, 8), shift, linear(8, 3)))
    assert found["1.wide"].reason == "one matrix"


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
    inner: Any = branch(lambda m, x: m.out(m.wide[0](x).chunk(2, -1)[0]), 4)
    inner.wide = container(inner.wide)
    model = nn.Sequential(linear(8, 8), inner, linear(8, 3))
    with pytest.raises(ValueError, match=r"^1.wide.*weight: looks like .*Branch splits channels"):
        split_parameters(model)


@pytest.mark.parametrize("joined", [lambda x: x.view(-1, 8), lambda x: x.reshape(len(x), -1)])
def test_images_may_be_joined_to_rows_before_a_layer(joined: Callable[[Tensor], Tensor]) -> None:
    def digits(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.fc1(joined(x)))
        return F.log_softmax(m.fc3(F.relu(m.fc2(x.view(-1, 8)))), dim=-1)

    model = module("Digits: fc1 8 8, fc2 8 8, fc3 8 3", digits)
    assert rules(model) == {"fc1": "spectral", "fc2": "spectral", "fc3": "adamw"}


def test_a_layer_named_as_a_function_takes_nothing_apart() -> None:
    layers = "Chunked: first 8 8, narrow 8 5, chunk 5 8"
    block = module(layers, lambda m, x: m.chunk(m.narrow(m.first(x))))
    assert rules(module(block=block, out=linear(8, 3)))["block.first"] == "spectral"


@pytest.mark.parametrize("kept", [torch.ones(8), np.ones(8), [1.0], 1.0], ids=type)
def test_a_forward_pass_may_use_what_is_no_function(kept: Any) -> None:
    added = branch(lambda m, x: m.out(m.wide(x) + m.kept), kept=kept)
    assert rules(nn.Sequential(linear(8, 8), added, linear(8, 3)))["1.wide"] == "spectral"


def test_a_parameter_may_be_elementwise() -> None:
    model = module("bare 4x6, layer 4 6, last 6 3")
    found = rules(model, elementwise=model.bare)
    assert found == {"bare": "adamw", "layer": "spectral", "last": "adamw"}


def test_flattened_parameters_are_refused() -> None:
    empty = module("layer 4 4", bias=nn.Parameter(torch.empty(0)))
    for flattened in (empty, module("_flat_param 64, layer 4 4")):
        with pytest.raises(ValueError, match=r"use fully_shard \(FSDP2\) or DDP"):
            split_parameters(flattened)
    shard = nn.Sequential(linear(4, 4), linear(4, 4))
    shard[1].weight = nn.Parameter(torch.randn(8))  # as after FSDP1 with use_orig_params
    with pytest.raises(ValueError, match=r"1.weight has shape \(8,\)"):
        split_parameters(shard)


def test_a_split_without_a_matrix_is_an_error() -> None:
    for model in (nn.LayerNorm(4), nn.Embedding(4, 3), linear(4, 4)):
        with pytest.raises(ValueError, match="has no parameter for the optimizer's rule"):
            split_parameters(model, elementwise=model if isinstance(model, nn.Linear) else ())


EACH = nn.ModuleList([linear(8, 2), linear(8, 2)])
PERCEPTRON = nn.Sequential(nn.Flatten(), linear(12, 6), nn.ReLU(), linear(6, 10))
ENDINGS: dict[str, tuple[nn.Module, str]] = {
    "DETR": (
        trunk(class_embed=linear(8, 92), bbox_embed=MLP(8, 8, 4)),
        "class_embed bbox_embed.layers.1",
    ),
    "of each layer": (
        trunk(class_embed=EACH, boxes=MLP(8, 8, 5)),
        "class_embed.0 class_embed.1 boxes.layers.1",
    ),
    "as many pixels as channels": (trunk(pred=linear(8, 8)), "pred"),
    "SAM": (trunk(iou=module("MLP: proj_in 8 8, proj_out 8 4")), "iou.proj_out"),
    "before a norm": (trunk(neck=linear(8, 6), end=nn.LayerNorm(6)), "neck"),
    "upsampled": (trunk(mask=nn.ConvTranspose2d(8, 3, 2)), "mask"),
    "behind a hidden layer": (
        trunk(top=nn.Sequential(nn.LayerNorm(8), linear(8, 16), linear(16, 40))),
        "top.2",
    ),
    "adapted": (
        trunk(final=adapter(8, 50).requires_grad_()),
        "final.base_layer final.lora_B.default",
    ),
    "of an auxiliary loss, before layers": (
        module("stem 8 8, auxiliary 8 5", body=MLP(8, 8), end=linear(8, 5)),
        "auxiliary end",
    ),
    "without layers in a list": (PERCEPTRON, "3"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_head_is_what_no_later_layer_takes(name: str) -> None:
    model, heads = ENDINGS[name]
    rows = by_name(model)
    assert [n for n, row in rows.items() if row.reason.endswith("a head")] == heads.split()
    assert {n for n, rule in rules(model).items() if rule == "adamw"} == {*heads.split()}


def tasks(m: Any, x: Tensor, task: str) -> Tensor:
    return forecast(m, x) if task == "forecast" else forecast(m, -x)


def forecast(m: Any, x: Tensor) -> Tensor:
    for block in m.blocks:
        x = block(m.enter(x))
    return m.out(x)


@pytest.mark.parametrize("order", [("enter", "blocks", "out"), ("blocks", "out", "enter")])
def test_layers_that_run_before_a_head_do_not_use_its_outputs(order: tuple[str, ...]) -> None:
    """A model may predict as many numbers as it reads, in one of several tasks."""
    members = {"enter": linear(5, 8), "blocks": blocks(1), "out": linear(8, 5)}
    for forward in (tasks, lambda m, x: m.out(m.blocks[0](m.enter(x)))):
        model = module("Forecaster:", forward, **{name: members[name] for name in order})
        if forward is tasks or order[-1] == "enter":
            with pytest.raises(ValueError, match=f"^out.{UNCLEAR}"):
                split_parameters(model)
        else:
            assert rules(model)["out"] == "adamw"


def test_a_linear_layer_named_like_a_norm_uses_outputs() -> None:
    layer = type("NormedLinear", (nn.Linear,), {})(6, 8, bias=False)
    found = rules(module("a 8 6", b=layer, blocks=blocks(1), out=linear(8, 3)))
    assert (found["a"], found["b"], found["out"]) == ("spectral", "spectral", "adamw")


def test_a_layer_in_a_head_with_a_weight_is_a_matrix() -> None:
    """The head consists of a dense layer followed by a tied embedding, as in ESM."""
    embedding = nn.Embedding(30, 8)
    head = module("Head: dense 8 8", norm=nn.LayerNorm(8), weight=embedding.weight)
    found = rules(module(embedding=embedding, blocks=blocks(1), lm_head=head))
    assert (found["lm_head.dense"], found["embedding"]) == ("spectral", "adamw")


def test_an_unknown_layer_named_like_an_embedding_is_no_table() -> None:
    layers = {"emb_linear": module("Dense: weight 32x32"), "out": linear(32, 32)}
    assert rules(trunk(layers))["blocks.0.emb_linear"] == "spectral"
    table = trunk({"token_embedding": module("TokenEmbedding: weight 50x8")})
    assert rules(table)["blocks.0.token_embedding"] == "adamw"


def test_a_query_of_a_separable_convolution_is_divided_by_heads() -> None:
    separable = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1))
    rows = by_name(module(heads=4, to_q=module(net=separable)))
    assert (rows["to_q.net.1"].matrices, rows["to_q.net.1"].rule) == (4, "spectral")
    assert rows["to_q.net.0"].rule == "adamw"


def test_a_layer_that_is_called_a_head_and_has_a_later_one_is_no_head() -> None:
    """Examples are `conv_head` in MobileNet, and the hidden layer of a head as in BERT."""
    found = rules(trunk(conv_head=nn.Conv2d(8, 20, 1), classifier=linear(20, 5)))
    assert (found["conv_head"], found["classifier"]) == ("spectral", "adamw")
    inner = module("dense 8 8", norm=nn.LayerNorm(8))
    found = rules(trunk(lm_head=inner, decoder=linear(8, 40)))
    assert (found["lm_head.dense"], found["decoder"]) == ("spectral", "adamw")


def coupled(m: Any, x: Tensor) -> Any:
    a, b = x.chunk(2, -1)
    scale, shift = m.both(m.first(a)).chunk(2, -1)
    return m.out(torch.cat([a, b * scale + shift], -1))


def test_halves_of_the_size_of_the_next_layer_are_refused() -> None:
    """In a flow, the number of scales and shifts equals the number of inputs of the next layer."""
    flow = module("Flow: first 4 8, both 8 8, out 8 8", coupled)
    model = nn.Sequential(flow, copy.deepcopy(flow), linear(8, 4))
    units: Any = {"*.first.weight": {}}
    with pytest.raises(ValueError, match="^0.both.weight: looks like .*Flow splits channels"):
        split_parameters(model, units=units)
    halves = {"rows": [4]}  # the second flow also splits the outputs of the first
    found = rules(model, units=units | {"*.both.weight": halves, "0.out.weight": halves})
    assert [*found.values()] == ["spectral"] * 6 + ["adamw"]


@pytest.mark.parametrize("body", [nn.LSTMCell(6, 4), nn.GRU(6, 4)])
def test_the_only_linear_layer_after_another_module_is_a_head(body: nn.Module) -> None:
    assert rules(module(body=body, out=linear(4, 3)))["out"] == "adamw"


def test_one_output_a_head_is_a_gate() -> None:
    """A gated delta network is an example. Other layers of this size may be position biases, as in
    Swin v2."""
    attention = module("Attention: gate 8 4", num_v_heads=4)
    assert rules(trunk({"attention": attention}))["blocks.0.attention.gate"] == "spectral"
    positions = nn.Sequential(linear(2, 16), nn.ReLU(), linear(16, 4))
    biased = module("Attention:", num_v_heads=4, bias=positions)
    with pytest.raises(ValueError, match=r"bias.2.weight: .*no layer uses its 4 outputs"):
        split_parameters(trunk({"attention": biased}))


@pytest.mark.parametrize(
    "model",
    [
        trunk({"offsets": linear(8, 20)}),  # of deformable attention
        trunk({"shared_keys": linear(8, 2)}),
        trunk(shift_and_scale=linear(8, 16), last=linear(8, 3)),
        trunk(boxes=nn.ModuleList([MLP(8, 8, 5), MLP(8, 8, 5)])),
        module("context 8 10", update=Block(), mix=linear(13, 8)),  # 10 of 13 inputs
        trunk(patches_out=linear(8, 16), smooth=nn.Conv2d(4, 4, 3)),  # U-ViT
        nn.Sequential(linear(8, 16), nn.ReLU(), linear(16, 8)),  # an autoencoder
        module("hidden 8 16, mean 16 8, deviation 16 8"),
    ],
)
def test_outputs_of_a_size_that_no_layer_has_are_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"(?s)no layer uses its.*example=.*elementwise"):
        split_parameters(model)


def test_a_layer_of_few_outputs_that_the_next_takes_is_a_matrix() -> None:
    squeezed = {"squeeze": nn.Conv2d(8, 2, 1), "expand": nn.Conv2d(2, 8, 1)}
    assert {*rules(trunk(squeezed)).values()} == {"spectral"}
