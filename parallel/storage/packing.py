"""Packing of parameters into equal shards such that no solid range is cut: owner storage.

Every item is one contiguous range. Inside it some ranges are solid (the units of whole-matrix
rules) and the rest may be cut anywhere, and so may the item between two solid ranges. For a given
shard size the earliest end over all orders obeys a dynamic program over how many items of each kind
are placed, because an earlier end never hurts what follows. Its states are kept in a beam; where
the beam holds them all (a few dense layers) the order is the best there is.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import NamedTuple

BEAM = 48
CANDIDATES = 64
JUMPS = 64  # after which a start is taken not to exist


class Item(NamedTuple):
    """One parameter: its elements and the ranges `(start, end)` in it that stay whole."""

    numel: int
    solids: tuple[tuple[int, int], ...]


class Packed(NamedTuple):
    """Elements of a shard, and where each item starts."""

    shard: int
    starts: tuple[int, ...]


@dataclass(frozen=True)
class _State:
    """A partial packing: how many items of each kind lie before `end`."""

    end: int
    kind: int
    start: int
    before: "_State | None"


@lru_cache(maxsize=64)
def pack(items: tuple[Item, ...], ranks: int, *, step: int, limit: float | None) -> Packed | None:
    """The packing of `items` in `ranks` shards with the least padding that the search finds.

    Shards are multiples of `step` elements. Returns None if it needs more than `limit` elements in
    all; without a limit there is always one (everything in the first shard). Remembered, since
    the layers of a model are alike.
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

    From the least that can hold everything: that itself, multiples of the solid ranges and of their
    common divisor (with which identical units tile borders), sums of two, and a geometric series.
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
    """Where each item starts in `ranks` shards of `shard` elements; None if no packing is found."""
    kinds = list(dict.fromkeys(items))
    counts = tuple(items.count(kind) for kind in kinds)
    spare = ranks * shard - sum(item.numel for item in items)
    earliest: dict[tuple[int, int], int | None] = {}
    beam: dict[tuple[int, ...], _State] = {(0,) * len(kinds): _State(0, -1, 0, None)}
    for _ in items:
        found: dict[tuple[int, ...], _State] = {}
        for used, state in beam.items():
            for kind, item in enumerate(kinds):
                if used[kind] == counts[kind]:
                    continue
                key = (kind, state.end % shard)
                if key not in earliest:
                    earliest[key] = _wait(item, key[1], shard)
                wait = earliest[key]
                if wait is None:
                    continue
                start = state.end + wait
                end = start + item.numel
                after = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                if after not in found or end < found[after].end:
                    found[after] = _State(end, kind, start, state)
        beam = _best(found, kinds, spare)
        if not beam:
            return None
    return _assign(items, kinds, next(iter(beam.values())))


def _best(
    found: dict[tuple[int, ...], _State], kinds: list[Item], spare: int
) -> dict[tuple[int, ...], _State]:
    """The states with the least padding so far, none with more than `spare`."""
    padding = {
        used: state.end - sum(n * kind.numel for n, kind in zip(used, kinds, strict=True))
        for used, state in found.items()
    }
    # Among equals those that have most of the large items behind them.
    order = sorted((pad, tuple(-n for n in used)) for used, pad in padding.items() if pad <= spare)
    keys = [tuple(-n for n in negative) for _, negative in order[:BEAM]]
    return {key: found[key] for key in keys}


def _wait(item: Item, position: int, shard: int) -> int | None:
    """Elements to leave free before `item` at `position` of a shard so that no border cuts a solid
    range of it; None if there is no such start within a shard.

    While a solid range is cut, every start before the one that puts it behind the border cuts it
    too, so each jump is to a lower bound of the answer.
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
    """The start of each item; items of one kind take their places in order."""
    places: dict[Item, list[int]] = {kind: [] for kind in kinds}
    state: _State | None = last
    while state is not None and state.kind >= 0:
        places[kinds[state.kind]].append(state.start)
        state = state.before
    return tuple(places[item].pop() for item in items)
