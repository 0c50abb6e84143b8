"""The units of multi-head latent attention, as declared by DeepSeek-V2 and V3.

Matrices into a latent (q_a, kv_a) are whole on every tensor-parallel rank: they are small, and
ranks then exchange latents instead of the residual stream. Matrices out of a latent are cut by
heads: each head's part of q_b is a unit, and its keys' and its values' parts of kv_b are two.
"""

from dataclasses import replace
from functools import partial

from models.config import LatentConfig
from models.experts import replicated_matrix
from models.units import ALL, Index, QKVUnits, Unit, gain_unit, row_parallel_unit


def latent_attention_units(
    layer: int,
    latent: LatentConfig,
    *,
    hidden: int,
    heads: int,
    granularity: QKVUnits,
    tensor_rank: int,
    tensor_size: int,
    gain_start: float = 1.0,
) -> list[Unit]:
    """Return the attention units of layer `layer` on tensor-parallel rank `tensor_rank`.

    A head has keys of its own, so `group` is the same as `head`. Raises ValueError for another
    `granularity` than those of QKVUnits.
    """
    prefix = f"layers.{layer}."
    gain = partial(gain_unit, start=gain_start)
    heads_of = partial(by_head, granularity=granularity, rank=tensor_rank, size=tensor_size)
    query_size = latent.nope_head_dim + latent.rope_head_dim
    units: list[Unit] = []
    if latent.query_rank is None:
        units += heads_of(prefix, "q", hidden, heads, {"q": query_size})
    else:
        units.append(into_latent(prefix, "q_a", (latent.query_rank, hidden)))
        units.append(gain(f"{prefix}attention.q_a_norm", latent.query_rank))
        units += heads_of(prefix, "q_b", latent.query_rank, heads, {"q_b": query_size})
    units.append(into_latent(prefix, "kv_a", (latent.kv_rank + latent.rope_head_dim, hidden)))
    units.append(gain(f"{prefix}attention.kv_a_norm", latent.kv_rank))
    parts = {"k_b": latent.nope_head_dim, "v_b": latent.value_head_dim}
    units += heads_of(prefix, "kv_b", latent.kv_rank, heads, parts)
    shape = (hidden, heads * latent.value_head_dim)
    units.append(row_parallel_unit(f"{prefix}o", f"{prefix}attention.o", "o", shape, tensor_size))
    return units


def into_latent(prefix: str, role: str, shape: tuple[int, int]) -> Unit:
    """Return the matrix from the residual stream to a latent."""
    unit = replicated_matrix(prefix + role, role, shape)
    return replace(unit, parameter=f"{prefix}attention.{role}")


def by_head(
    prefix: str,
    name: str,
    width: int,
    heads: int,
    parts: dict[str, int],
    *,
    granularity: QKVUnits,
    rank: int,
    size: int,
) -> list[Unit]:
    """Return the units of a parameter `[heads, sum of parts, width]`, cut over ranks by heads.

    `parts` are the roles of a head's rows and how many rows each has. Every part of every head is a
    unit; with `component` the part of all heads is one, with `fused` the whole parameter.
    """
    local = heads // size
    rows = sum(parts.values())

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
            shard_axis=0 if len(axes) > 2 and size > 1 else None,
            draws=tuple((prefix + drawn, count) for drawn, count in draws),
        )

    places: list[tuple[str, int, slice]] = []
    for role, count in parts.items():
        start = places[-1][2].stop if places else 0
        places.append((role, count, slice(start, start + count)))
    if granularity in ("head", "group"):
        return [
            unit(role, f"{role}.{head}", (i, where), (count, width), [(f"{role}.{head}", count)])
            for i, head in enumerate(range(rank * local, (rank + 1) * local))
            for role, count, where in places
        ]
    every = range(heads)
    if granularity == "component":
        return [
            unit(
                role,
                role,
                (ALL, where),
                (heads, count, width),
                [(f"{role}.{head}", count) for head in every],
            )
            for role, count, where in places
        ]
    if granularity == "fused":
        draws = [(f"{role}.{head}", count) for head in every for role, count, _ in places]
        return [unit(name, name, (ALL,), (heads, rows, width), draws)]
    raise ValueError(f"qkv_units must be one of head, group, component, fused, got {granularity!r}")
