"""The units of a decoder, from its config alone: no engine, no process group, no memory."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from models.config import ModelConfig, MoEConfig
from models.layout import ChunkSpec, Split
from models.units import (
    ALL,
    Index,
    Unit,
    attention_units,
    gain_unit,
    gated_mlp_units,
    mlp_units,
    row_parallel_unit,
    vocabulary_unit,
)


def mixture_units(layer: int, hidden: int, moe: MoEConfig, split: Split) -> list[Unit]:
    """Return the router, the routed and the shared experts of layer `layer` on one rank.

    Each expert is a gated feed-forward block of its own, named by its index in the whole layer,
    whatever rank holds it. Every expert-parallel rank holds as many neighbouring experts.
    """
    prefix = f"layers.{layer}."
    units = []
    if moe.shared_experts:
        width = moe.shared_experts * moe.expert_ffn
        shared = gated_mlp_units(layer, hidden, width, split.split_gate_up, split.tensor_size)
        units += moved(shared, prefix, "shared", "shared_", "dense")
        if moe.shared_gate:
            units.append(replicated_matrix(prefix + "shared.router", "shared_router", (1, hidden)))
    units.append(replicated_matrix(prefix + "router", "router", (moe.experts, hidden)))
    count = moe.experts // split.expert_size
    expert = gated_mlp_units(
        layer, hidden, moe.expert_ffn, split.split_gate_up, split.expert_tensor
    )
    for index in range(split.expert_rank * count, (split.expert_rank + 1) * count):
        units += moved(expert, prefix, f"experts.{index}", "expert_", "expert")
    return units


def moved(
    units: Iterable[Unit],
    prefix: str,
    place: str,
    kind: str,
    domain: Literal["dense", "expert"],
) -> list[Unit]:
    """Return the units of a layer's gated block as those of the block `place` of that layer.

    Names get `place` after the layer's `prefix`, roles get `kind` in front.
    """
    new = f"{prefix}{place}."
    return [
        replace(
            unit,
            name=new + unit.name.removeprefix(prefix),
            parameter=new + unit.parameter.removeprefix(prefix + "mlp."),
            role=kind + unit.role,
            draws=tuple((new + name.removeprefix(prefix), rows) for name, rows in unit.draws),
            domain=domain,
        )
        for unit in units
    ]


def replicated_matrix(name: str, role: str, shape: tuple[int, int]) -> Unit:
    """Return a matrix that every tensor-parallel rank holds whole."""
    return Unit(
        name=name,
        parameter=name,
        role=role,
        view_shape=shape,
        index=(ALL,),
        axes=shape,
        replicated=True,
        draws=((name, shape[0]),),
    )


def latent_attention_units(
    model: ModelConfig, layer: int, split: Split, gain_start: float = 1.0
) -> list[Unit]:
    """Return the units of multi-head latent attention (DeepSeek-V2) of layer `layer` on one rank.

    Matrices into a latent (q_a, kv_a) are whole on every tensor-parallel rank: they are small, and
    ranks then exchange latents instead of the residual stream. Matrices out of a latent are cut by
    heads: each head's part of q_b is a unit, and its keys' and its values' parts of kv_b are two. A
    head has keys of its own, so the `qkv_units` group and head are the same. Raises ValueError for
    others than those of QKVUnits.
    """
    latent, hidden, prefix = model.latent, model.hidden, f"layers.{layer}."
    assert latent is not None
    query_rank, kv_rank = latent.query_rank, latent.kv_rank
    query_size = latent.nope_head_dim + latent.rope_head_dim
    by_heads = HeadParameters(prefix, model.heads, split)

    def gain(name: str, size: int) -> Unit:
        return gain_unit(f"{prefix}attention.{name}", size, start=gain_start)

    if query_rank is None:
        units = by_heads.units("q", hidden, {"q": query_size})
    else:
        units = [into_latent(prefix, "q_a", (query_rank, hidden)), gain("q_a_norm", query_rank)]
        units += by_heads.units("q_b", query_rank, {"q_b": query_size})
    units.append(into_latent(prefix, "kv_a", (kv_rank + latent.rope_head_dim, hidden)))
    units.append(gain("kv_a_norm", kv_rank))
    parts = {"k_b": latent.nope_head_dim, "v_b": latent.value_head_dim}
    units += by_heads.units("kv_b", kv_rank, parts)
    shape = (hidden, model.heads * latent.value_head_dim)
    name, parameter = f"{prefix}o", f"{prefix}attention.o"
    units.append(row_parallel_unit(name, parameter, "o", shape, split.tensor_size))
    return units


def into_latent(prefix: str, role: str, shape: tuple[int, int]) -> Unit:
    """Return the matrix from the residual stream to a latent."""
    unit = replicated_matrix(prefix + role, role, shape)
    return replace(unit, parameter=f"{prefix}attention.{role}")


@dataclass(frozen=True)
class HeadParameters:
    """Parameters `[heads, sum of parts, width]` of one layer, cut over ranks by heads."""

    prefix: str
    heads: int
    split: Split

    def units(self, name: str, width: int, parts: dict[str, int]) -> list[Unit]:
        """Return the units of the parameter `name`.

        `parts` are the roles of a head's rows and how many rows each has. Every part of every head
        is a unit; with `component` the part of all heads is one, with `fused` the whole parameter.
        """
        prefix, heads, tensor = self.prefix, self.heads, self.split.tensor_size
        local, rows = heads // tensor, sum(parts.values())

        def unit(
            role: str, own: str, index: Index, axes: tuple[int, ...], draws: list[tuple[str, int]]
        ) -> Unit:
            return Unit(
                name=prefix + own,
                parameter=f"{prefix}attention.{name}",
                role=role,
                view_shape=(local, rows, width),
                index=index,
                axes=axes,
                shard_axis=0 if len(axes) > 2 and tensor > 1 else None,
                draws=tuple((prefix + drawn, count) for drawn, count in draws),
            )

        counts = zip(parts.items(), accumulate(parts.values()), strict=True)
        ranges = [(role, n, slice(end - n, end)) for (role, n), end in counts]
        kind = self.split.qkv_units
        if kind in ("head", "group"):
            first = self.split.tensor_rank * local
            return [
                unit(role, f"{role}.{head}", (i, part), (n, width), [(f"{role}.{head}", n)])
                for i, head in enumerate(range(first, first + local))
                for role, n, part in ranges
            ]
        if kind == "component":
            return [
                unit(
                    role,
                    role,
                    (ALL, part),
                    (heads, n, width),
                    [(f"{role}.{head}", n) for head in range(heads)],
                )
                for role, n, part in ranges
            ]
        if kind == "fused":
            draws = [(f"{role}.{head}", n) for head in range(heads) for role, n, _ in ranges]
            return [unit(name, name, (ALL,), (heads, rows, width), draws)]
        raise ValueError(f"qkv_units must be one of head, group, component, fused, got {kind!r}")


def decoder_units(
    model: ModelConfig, chunk: ChunkSpec, split: Split, *, post_norms: bool, gain_start: float
) -> list[Unit]:
    """Return the units of a chunk on one rank, in forward order.

    With `post_norms` attention and feed-forward block are each followed by a norm. The gains of
    norms begin with `gain_start`.
    """

    def gain(name: str) -> Unit:
        return gain_unit(name, model.hidden, start=gain_start)

    def vocabulary(role: str) -> Unit:
        return vocabulary_unit(role, (model.padded_vocab, model.hidden), split.tensor_size)

    units = [vocabulary("embedding")] if chunk.embedding else []
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
            units += mixture_units(layer, model.hidden, moe, split)
        elif model.gated:
            units += gated_mlp_units(
                layer, model.hidden, model.ffn, split.split_gate_up, split.tensor_size
            )
        else:
            units += mlp_units(layer, model.hidden, model.ffn, split.tensor_size)
        if post_norms:
            units.append(gain(prefix + "post_mlp_norm"))
    if chunk.head:
        units += [gain("final_norm"), vocabulary("head")]
    return units
