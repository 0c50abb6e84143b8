"""The units of multi-head latent attention, as declared by DeepSeek-V2 and V3.

Matrices into a latent (q_a, kv_a) are whole on every tensor-parallel rank: they are small, and
ranks then exchange latents instead of the residual stream. Matrices out of a latent are cut by
heads: each head's part of q_b is a unit, and its keys' and its values' parts of kv_b are two.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

from models.config import ModelConfig
from models.experts import replicated_matrix
from models.layout import Split
from models.units import ALL, Index, Unit, gain_unit, row_parallel_unit


def latent_attention_units(
    model: ModelConfig, layer: int, split: Split, gain_start: float = 1.0
) -> list[Unit]:
    """Return the attention units of layer `layer` on one rank.

    A head has keys of its own, so the `qkv_units` group and head are the same. Raises ValueError
    for others than those of QKVUnits.
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
