"""Parameters that share a bucket, buckets that share a step group, and the packing of a bucket.

Buckets and step groups consist of consecutive parameters and buckets.

Owner storage packs the parameters of a bucket into equal shards such that no solid range is cut.
Every item is one contiguous range. Parts of it are solid (the units of whole-matrix rules); the
rest may be cut anywhere, and so may the item between two solid ranges. For a given shard size, the
earliest end over all orders follows from a dynamic program over the number of items of each kind
placed so far, because an earlier end never harms what follows. Its states are kept in a beam; if
the beam holds them all, as for a few dense layers, the order is optimal.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import gcd, prod
from typing import NamedTuple

from models.units import Unit

BEAM = 48
"""States that the search keeps after each item."""
CANDIDATES = 64
"""Shard sizes that are tried."""
JUMPS = 64
"""Starts of an item that are tried before none is assumed to exist."""


class Item(NamedTuple):
    """One parameter: its elements and the ranges `(start, end)` in it that must not be cut."""

    numel: int
    solids: tuple[tuple[int, int], ...]


class Packed(NamedTuple):
    """Elements of a shard, and the start of each item."""

    shard: int
    starts: tuple[int, ...]


@dataclass(frozen=True)
class _State:
    """A partial packing that ends at `end`; its last item is of `kind` and begins at `start`."""

    end: int
    kind: int
    start: int
    before: "_State | None"


@lru_cache(maxsize=64)
def pack(items: tuple[Item, ...], ranks: int, *, step: int, limit: float | None) -> Packed | None:
    """Pack `items` into `ranks` shards with the least padding that the search finds.

    Shards are multiples of `step` elements. Returns None if that takes more than `limit` elements
    in all; without a limit there is always a packing (everything in the first shard). Results are
    cached, since the layers of a model have equal shapes.
    """
    for shard in shard_candidates(items, ranks, step=step, limit=limit):
        starts = _starts(items, ranks, shard)
        if starts is not None:
            return Packed(shard, starts)
    return None


def shard_candidates(
    items: Sequence[Item], ranks: int, *, step: int, limit: float | None
) -> list[int]:
    """Shard sizes to try, ascending, multiples of `step`.

    They are the least that can hold everything and, from there on, multiples of the solid ranges'
    sizes and of their common divisor (for which identical units end at shard borders), sums of two
    sizes, and a geometric series.
    """
    total = sum(item.numel for item in items)
    sizes = sorted({end - start for item in items for start, end in item.solids})
    least = max(-(-total // ranks), sizes[-1] if sizes else 1)
    most = total if limit is None else int(limit // ranks)
    if least > most:
        return []
    raw = {least, total}
    if sizes:
        unit = gcd(*sizes)
        raw |= {(-(-least // unit) + i) * unit for i in range(8)}
        raw |= {(-(-least // size) + i) * size for size in sizes for i in range(2)}
        raw |= {a + b for a in sizes for b in sizes}
    growth = least
    while growth < total:
        growth = -(-growth * 21 // 20)
        raw.add(growth)
    rounded = {-(-size // step) * step for size in raw if least <= size}
    fitting = sorted(size for size in rounded if limit is None or size * ranks <= limit)
    if limit is None and len(fitting) > CANDIDATES:
        return [*fitting[: CANDIDATES - 1], fitting[-1]]
    return fitting[:CANDIDATES]


def _starts(items: Sequence[Item], ranks: int, shard: int) -> tuple[int, ...] | None:
    """Start of each item in `ranks` shards of `shard` elements; None if no packing is found."""
    kinds = list(dict.fromkeys(items))
    counts = tuple(items.count(kind) for kind in kinds)
    spare = ranks * shard - sum(item.numel for item in items)
    earliest: dict[tuple[int, int], int | None] = {}
    beam: dict[tuple[int, ...], _State] = {(0,) * len(kinds): _State(0, -1, 0, None)}
    for _ in items:
        reached: dict[tuple[int, ...], _State] = {}
        for used, state in beam.items():
            for kind, item in enumerate(kinds):
                if used[kind] == counts[kind]:
                    continue
                key = (kind, state.end % shard)
                if key not in earliest:
                    earliest[key] = _gap(item, key[1], shard)
                gap = earliest[key]
                if gap is None:
                    continue
                start = state.end + gap
                end = start + item.numel
                after = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                if after not in reached or end < reached[after].end:
                    reached[after] = _State(end, kind, start, state)
        beam = _best(reached, kinds, spare)
        if not beam:
            return None
    return _assign(items, kinds, next(iter(beam.values())))


def _best(
    reached: dict[tuple[int, ...], _State], kinds: list[Item], spare: int
) -> dict[tuple[int, ...], _State]:
    """Keep the states with the least padding so far, none with more than `spare`."""
    padding = {
        used: state.end - sum(n * kind.numel for n, kind in zip(used, kinds, strict=True))
        for used, state in reached.items()
    }
    # Among equals, those that have placed most of the large items.
    order = sorted((pad, tuple(-n for n in used)) for used, pad in padding.items() if pad <= spare)
    keys = [tuple(-n for n in negative) for _, negative in order[:BEAM]]
    return {key: reached[key] for key in keys}


def _gap(item: Item, position: int, shard: int) -> int | None:
    """Elements to leave free before `item` so that no shard border cuts a solid range of it.

    `position` is where in a shard the free elements begin. Returns None if no start within a shard
    will do. If a border cuts a solid range, so it does for every start before the one that puts the
    range behind the border; so each jump goes to a lower bound of the answer.
    """
    first = [start for start, _ in item.solids]
    start = position
    for _ in range(JUMPS):
        border = (start // shard + 1) * shard
        while border < start + item.numel:
            inside = bisect_right(first, border - start) - 1
            if inside >= 0:
                low, high = item.solids[inside]
                if low < border - start < high:
                    break
            border += shard
        else:
            return start - position
        start = border - low
        if start >= position + shard:
            return None
    return None


def _assign(items: Sequence[Item], kinds: list[Item], last: _State) -> tuple[int, ...]:
    """Start of each item, given the last state; items of one kind take their places in order."""
    places: dict[Item, list[int]] = {kind: [] for kind in kinds}
    state: _State | None = last
    while state is not None and state.kind >= 0:
        places[kinds[state.kind]].append(state.start)
        state = state.before
    return tuple(places[item].pop() for item in items)


DEFAULT_BUCKET = 40_000_000
"""Elements."""
LAYERS_PER_BUCKET = 2
NEGLIGIBLE = 0.01
"""Share of a bucket's size by which small parameters, such as gains, may exceed it."""

STEP_ELEMENTS = 1 << 27
"""Elements of a rank that a step group has at most by default, where four groups allow it. Their
step takes about 24 bytes of scratch per element."""
MOST_STEP_GROUPS = 4


def bucket_parameters(units: Sequence[Unit], *, join_layers: bool = False) -> list[list[str]]:
    """Names of the parameters of each bucket, in backward order.

    Whole layers, and the parameters between them, are joined up to `bucket_numel` elements and two
    layers.
    """
    sizes = {unit.parameter: prod(unit.view_shape) for unit in units}
    most = bucket_numel(sizes, join_layers) * (1 + NEGLIGIBLE)
    buckets: list[list[str]] = []
    layers = numel = 0
    for layer, block in groupby(reversed(sizes), layer_of):
        names = list(block)
        size, in_layer = sum(sizes[name] for name in names), int(layer is not None)
        if not buckets or numel + size > most or layers + in_layer > LAYERS_PER_BUCKET:
            buckets.append([])
            layers = numel = 0
        buckets[-1] += names
        numel, layers = numel + size, layers + in_layer
    return buckets


def set_apart(buckets: Iterable[list[str]], some: Collection[str]) -> list[list[str]]:
    """Split each bucket into its names outside of `some` and those in it, none empty, in order."""
    split = (([n for n in b if n not in some], [n for n in b if n in some]) for b in buckets)
    return [names for both in split for names in both if names]


def bucket_numel(sizes: dict[str, int], join_layers: bool) -> int:
    """Elements at which a bucket is closed.

    It is one layer, or 40M elements if a layer is smaller, but at most two layers. With
    `join_layers` it is always two layers, since more matrices can be packed more tightly.
    """
    layers = Counter[str]()
    for name, size in sizes.items():
        layer = layer_of(name)
        if layer is not None:
            layers[layer] += size
    largest = max(layers.values(), default=DEFAULT_BUCKET)
    joined = LAYERS_PER_BUCKET * largest
    return joined if join_layers else min(max(largest, DEFAULT_BUCKET), joined)


def layer_of(parameter: str) -> str | None:
    """Prefix of the layer: `layers.3` of `layers.3.mlp.down`, None outside of the layers."""
    parts = parameter.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else None


def default_step_groups(shard_numel: int) -> int:
    """Return the number of step groups for a rank whose shards hold `shard_numel` elements.

    The fewest of at most four that have no more than `STEP_ELEMENTS` each: every further group
    makes a rank step more, and smaller, stacks of matrices, each with all launches of its rule.
    """
    return min(MOST_STEP_GROUPS, max(1, -(-shard_numel // STEP_ELEMENTS)))


def forward_groups(buckets: int, groups: int) -> list[tuple[int, ...]]:
    """Indices of the buckets of each step group, in forward order.

    Buckets are numbered in backward order. There are at most `groups` step groups, each of
    consecutive buckets, and their numbers of buckets differ by at most one.
    """
    order = range(buckets)[::-1]
    count = min(groups, buckets)
    return [tuple(order[buckets * i // count : buckets * (i + 1) // count]) for i in range(count)]
