"""Declares the units of a decoder from its config, without megatron-core or process groups."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, product
from typing import Literal

from models.config import ModelConfig, MoEConfig
from models.layout import ChunkSpec, Split
from models.units import ALL, Index, Unit, matrix_unit, vector_unit


def gated_mlp_units(
    prefix: str,
    hidden: int,
    ffn: int,
    split: Split,
    *,
    inner: str = "",
    kind: str = "",
    domain: Literal["dense", "expert"] = "dense",
) -> list[Unit]:
    """Return one rank's gate, up and down units of a feed-forward block. Gate and up share one
    parameter.

    Unit names start with `prefix`, parameter names with `prefix` and `inner`, and roles with
    `kind`.
    """
    ranks = split.expert_tensor if domain == "expert" else split.tensor_size
    apart = split.split_gate_up
    indices: dict[str, Index] = {"gate": (0,), "up": (1,)} if apart else {"gate_up": (ALL,)}
    units = [
        Unit(
            name=prefix + role,
            parameter=f"{prefix}{inner}gate_up",
            role=kind + role,
            view_shape=(2, ffn // ranks, hidden),
            index=index,
            axes=(ffn, hidden) if apart else (2, ffn, hidden),
            shard_axis=(0 if apart else 1) if ranks > 1 else None,
            draws=tuple((prefix + part, ffn) for part in ([role] if apart else ("gate", "up"))),
            domain=domain,
        )
        for role, index in indices.items()
    ]
    name, shape = f"{prefix}{inner}down", (hidden, ffn)
    down = matrix_unit(f"{prefix}down", name, f"{kind}down", shape, ranks, 1)
    return [*units, replace(down, domain=domain)]


def mixture_units(prefix: str, hidden: int, moe: MoEConfig, split: Split) -> list[Unit]:
    """Return one rank's units for the router, routed experts and shared experts of a layer, whose
    names start with `prefix`.

    Each routed expert is a separate gated feed-forward block, named by its global index in the
    layer. Each expert-parallel rank holds the same number of consecutive experts.
    """
    units = []
    if moe.shared_experts:
        width = moe.shared_experts * moe.expert_ffn
        units += gated_mlp_units(f"{prefix}shared.", hidden, width, split, kind="shared_")
        if moe.shared_gate:
            name = f"{prefix}shared.router"
            units.append(matrix_unit(name, name, "shared_router", (1, hidden), 1, None))
    name = f"{prefix}router"
    units.append(matrix_unit(name, name, "router", (moe.experts, hidden), 1, None))
    count = moe.experts // split.expert_size
    for index in range(split.expert_rank * count, (split.expert_rank + 1) * count):
        block = f"{prefix}experts.{index}."
        units += gated_mlp_units(
            block, hidden, moe.expert_ffn, split, kind="expert_", domain="expert"
        )
    return units


def attention_units(
    model: ModelConfig, layer: int, split: Split, gain_start: float = 1.0
) -> list[Unit]:
    """Return one rank's units for grouped-query attention in layer `layer`.

    Megatron's fused QKV weight consists of one block per KV head. Each block contains the group's
    query heads, key head and value head. `model.qk_norm` adds two gains `[head_size]`, one shared
    by all query heads and one shared by all key heads. Raises ValueError if `split.qkv_units` is
    not in QKVUnits.
    """
    prefix, size, groups = f"layers.{layer}.", model.head_size, model.query_groups
    heads = {"q": model.heads // groups, "k": 1, "v": 1}
    roles = [(role, count, size) for role, count in heads.items()]
    infix = "group." if split.qkv_units == "group" else ""
    units = head_units(prefix, "qkv", roles, groups, model.hidden, split, infix)
    if model.attention_bias != "none":
        rows = (model.heads + 2 * groups) * size
        name, tensor = f"{prefix}attention.qkv_bias", split.tensor_size
        units.append(vector_unit(name, "bias", rows, start=0.0, tensor_size=tensor))
    for name in ("q_norm", "k_norm") if model.qk_norm else ():
        gain = vector_unit(f"{prefix}attention.{name}", "gain", size, start=gain_start)
        units.append(replace(gain, partial_over_tensor=True))
    shape = (model.hidden, model.heads * size)
    o = matrix_unit(f"{prefix}o", f"{prefix}attention.o", "o", shape, split.tensor_size, 1)
    units.append(o)
    if model.attention_bias == "all":
        units.append(vector_unit(f"{prefix}attention.o_bias", "bias", model.hidden, start=0.0))
    return units


def latent_attention_units(
    model: ModelConfig, layer: int, split: Split, gain_start: float = 1.0
) -> list[Unit]:
    """Return one rank's units for multi-head latent attention (DeepSeek-V2) in layer `layer`.

    The down-projections to a latent (q_a, kv_a) are small, so every tensor-parallel rank holds a
    copy. Ranks therefore exchange latents instead of the residual stream. The up-projections are
    sharded by head. Each head's slice of q_b is one unit, and its key and value slices of kv_b are
    two more. Since every head has its own keys, `group` and `head` are equivalent values of
    `split.qkv_units`. Raises ValueError if `split.qkv_units` is not in QKVUnits.
    """
    latent, hidden, heads = model.latent, model.hidden, model.heads
    assert latent is not None
    query_rank, kv_rank = latent.query_rank, latent.kv_rank
    query_size = latent.nope_head_dim + latent.rope_head_dim
    prefix = f"layers.{layer}."
    inner = prefix + "attention."
    if query_rank is None:
        units = head_units(prefix, "q", [("q", 1, query_size)], heads, hidden, split)
    else:
        shape = (query_rank, hidden)
        units = [matrix_unit(prefix + "q_a", inner + "q_a", "q_a", shape, 1, None)]
        units.append(vector_unit(inner + "q_a_norm", "gain", query_rank, start=gain_start))
        units += head_units(prefix, "q_b", [("q_b", 1, query_size)], heads, query_rank, split)
    shape = (kv_rank + latent.rope_head_dim, hidden)
    units.append(matrix_unit(prefix + "kv_a", inner + "kv_a", "kv_a", shape, 1, None))
    units.append(vector_unit(inner + "kv_a_norm", "gain", kv_rank, start=gain_start))
    roles = [("k_b", 1, latent.nope_head_dim), ("v_b", 1, latent.value_head_dim)]
    units += head_units(prefix, "kv_b", roles, heads, kv_rank, split)
    shape = (hidden, heads * latent.value_head_dim)
    units.append(matrix_unit(prefix + "o", inner + "o", "o", shape, split.tensor_size, 1))
    return units


def head_units(
    prefix: str,
    parameter: str,
    roles: Sequence[tuple[str, int, int]],
    groups: int,
    width: int,
    split: Split,
    infix: str = "",
) -> list[Unit]:
    """Return one rank's units for an attention parameter `[groups, rows per group, width]`.

    Depending on `split.qkv_units`, a unit is one head (`head`), all heads of a role in a group
    (`group`), all heads of a role (`component`), or the whole parameter (`fused`).

    Args:
        prefix: prefix of the layer's names.
        parameter: name of the parameter within attention.
        roles: (role, heads per group, rows per head), in row order within a group.
        groups: number of KV heads; the parameter is sharded across ranks by group.
        width: number of columns.
        split: how to split the parameter into units.
        infix: text between role and number in unit names.

    Raises ValueError if `split.qkv_units` is not in QKVUnits.
    """
    local = groups // split.tensor_size
    ends = accumulate(heads * rows for _, heads, rows in roles)
    parts = [(*part, end) for part, end in zip(roles, ends, strict=True)]
    rows_of_group = parts[-1][-1]

    def draws(role: str, rows: int, heads: range) -> list[tuple[str, int]]:
        return [(f"{prefix}{role}.{head}", rows) for head in heads]

    def unit(
        role: str, name: str, index: Index, axes: tuple[int, ...], drawn: list[tuple[str, int]]
    ) -> Unit:
        return Unit(
            name=prefix + name,
            parameter=f"{prefix}attention.{parameter}",
            role=role,
            view_shape=(local, rows_of_group, width),
            index=index,
            axes=axes,
            shard_axis=0 if len(axes) > 2 and split.tensor_size > 1 else None,
            draws=tuple(drawn),
        )

    kind, units = split.qkv_units, []
    index: Index
    if kind in ("head", "group"):
        for i, (role, heads, rows, end) in product(range(local), parts):
            count = 1 if kind == "group" else heads
            joined, size = heads // count, heads // count * rows
            for j in range(count):
                number = (split.tensor_rank * local + i) * count + j
                start = end - (count - j) * size
                drawn = draws(role, rows, range(number * joined, (number + 1) * joined))
                index = (i, slice(start, start + size))
                name = f"{role}.{infix}{number}"
                units.append(unit(role, name, index, (size, width), drawn))
    elif kind == "component":
        for role, heads, rows, end in parts:
            size, drawn = heads * rows, draws(role, rows, range(groups * heads))
            index, axes = (ALL, slice(end - size, end)), (groups, size, width)
            units.append(unit(role, role, index, axes, drawn))
    elif kind == "fused":
        drawn = []
        for group, (role, heads, rows, _) in product(range(groups), parts):
            drawn += draws(role, rows, range(group * heads, (group + 1) * heads))
        axes = (groups, rows_of_group, width)
        units.append(unit(parameter, parameter, (ALL,), axes, drawn))
    else:
        raise ValueError(f"qkv_units must be one of head, group, component, fused, got {kind!r}")
    return units


def decoder_units(
    model: ModelConfig, chunk: ChunkSpec, split: Split, *, post_norms: bool, gain_start: float
) -> list[Unit]:
    """Return one rank's units for a chunk, in forward order.

    `post_norms` adds a norm after attention and another after the feed-forward block. Gains are
    initialised to `gain_start`. A tied embedding is a single unit. If a chunk contains the head but
    not the embedding, the head parameter holds a copy of the embedding.
    """

    def gain(name: str) -> Unit:
        return vector_unit(name, "gain", model.hidden, start=gain_start)

    def vocabulary(role: str, tied_stage: Literal["first", "last"] | None = None) -> Unit:
        shape = (model.padded_vocab, model.hidden)
        unit = matrix_unit(role, role, role, shape, split.tensor_size, 0)
        parameter = "head" if tied_stage == "last" else role
        return replace(unit, parameter=parameter, tied_stage=tied_stage)

    tied = model.tie_embeddings
    units = []
    if chunk.embedding:
        units.append(vocabulary("embedding", "first" if tied and not chunk.head else None))
    attention = attention_units if model.latent is None else latent_attention_units
    for layer in chunk.layers:
        prefix = f"layers.{layer}."
        units.append(gain(prefix + "attention_norm"))
        units += attention(model, layer, split, gain_start)
        if post_norms:
            units.append(gain(prefix + "post_attention_norm"))
        units.append(gain(prefix + "mlp_norm"))
        moe = model.mixture(layer)
        if moe is not None:
            units += mixture_units(prefix, model.hidden, moe, split)
        elif model.gated:
            units += gated_mlp_units(prefix, model.hidden, model.ffn, split, inner="mlp.")
        else:
            up, down = (model.ffn, model.hidden), (model.hidden, model.ffn)
            ranks = split.tensor_size
            units.append(matrix_unit(prefix + "up", prefix + "mlp.up", "up", up, ranks, 0))
            units.append(matrix_unit(prefix + "down", prefix + "mlp.down", "down", down, ranks, 1))
        if post_norms:
            units.append(gain(prefix + "post_mlp_norm"))
    if chunk.head:
        units.append(gain("final_norm"))
        if not tied:
            units.append(vocabulary("head"))
        elif not chunk.embedding:
            units.append(vocabulary("embedding", "last"))
    return units
