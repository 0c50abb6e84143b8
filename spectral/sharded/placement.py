"""Placement: assigns each matrix to the rank that owns it and runs its rule.

Placement only depends on costs, sizes and shards, so every rank computes the same owners. Ranks are
numbered within the group that shares the matrices.
"""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..batching import grouped

Strategy = Literal["auto", "ping_pong"]
"""Placement strategy; see `place`."""

SLACK = 0.02
"""Largest relative increase of the maximum load that sending fewer elements may cause."""


@dataclass(frozen=True)
class Work:
    """A unit's cost and the ranks that store its elements.

    cost      FLOPs per step
    holders   number of elements in each rank's shard, excluding ranks without elements
    """

    name: str
    cost: float
    holders: Mapping[int, int]

    @property
    def numel(self) -> int:
        """Number of elements in the whole unit."""
        return sum(self.holders.values())


@dataclass(frozen=True)
class Placement:
    """The owners of a rank group's units.

    owners     each unit's owner (rank within the group), by ascending unit name
    loads      each rank's total cost in FLOPs per step, including its base load
    moved      number of elements whose momentum is sent to an owner on another rank
    """

    owners: dict[str, int]
    loads: tuple[float, ...]
    moved: int


def place(
    strategy: Strategy, works: Sequence[Work], ranks: int, *, base: Sequence[float] | None = None
) -> Placement:
    """Choose the owners of `works` among `ranks` ranks. Ties are broken by unit name.

    `auto` computes the placements of `longest_processing_time` and `ping_pong`, and picks the
    placement that moves fewer elements, unless its maximum load is higher by more than `SLACK`.
    `base` is the load that each rank already has: for example, a stage's experts are placed
    after its dense matrices. ping_pong ignores `base`.

    Raises ValueError if two units have the same name.
    """
    base = [0.0] * ranks if base is None else base
    works = sorted(works, key=lambda work: work.name)
    twice = [name for name, n in Counter(work.name for work in works).items() if n > 1]
    if twice:
        raise ValueError(f"names of units must be unique, got {', '.join(twice)} more than once")
    tried = []
    if strategy == "auto":
        costs, holders = [work.cost for work in works], [work.holders for work in works]
        tried.append(_placement(works, longest_processing_time(costs, base, holders), base))
    tried.append(_placement(works, ping_pong([work.numel for work in works], ranks), base))
    limit = min(max(placement.loads) for placement in tried) * (1 + SLACK)
    return min(
        (placement for placement in tried if max(placement.loads) <= limit),
        key=lambda placement: placement.moved,
    )


def _placement(works: Sequence[Work], ranks: Sequence[int], base: Sequence[float]) -> Placement:
    owners = {work.name: rank for work, rank in zip(works, ranks, strict=True)}
    loads = loads_of([work.cost for work in works], ranks, base)
    moved = sum(work.numel - work.holders.get(owners[work.name], 0) for work in works)
    return Placement(owners, loads, moved)


def ping_pong(sizes: Sequence[float], ranks: int) -> tuple[int, ...]:
    """Assign items in order of ascending size to ranks 0 ... n-1, then n-1 ... 0, and so on.

    Items of equal size keep their order. Source: "Controlled LLM Training on Spectral Sphere".
    """
    owners = [0] * len(sizes)
    for i, item in enumerate(sorted(range(len(sizes)), key=lambda item: sizes[item])):
        lap, place_in_lap = divmod(i, ranks)
        owners[item] = place_in_lap if lap % 2 == 0 else ranks - 1 - place_in_lap
    return tuple(owners)


def longest_processing_time(
    costs: Sequence[float],
    base: Sequence[float],
    holders: Sequence[Mapping[int, int]] | None = None,
) -> tuple[int, ...]:
    """Assign items in order of descending cost, each to the least loaded rank.

    Ties go to the lower rank. Items of equal cost keep their order. If all loads in `base` are 0,
    the maximum load is at most 4/3 of the optimum (Graham, 1969).

    If `holders` (the number of elements of each item on each rank) is given, two methods are used
    to reduce the number of elements sent, and the better result is returned. The first method swaps
    items of equal cost. The second method assigns each item to the rank that holds most of its
    elements, as long as no load exceeds `1 + SLACK` times the maximum load without `holders`.
    """
    plain = _greedy(costs, base, [{}] * len(costs), 0.0)
    if holders is None:
        return plain
    limit = max(loads_of(costs, plain, base)) * (1 + SLACK)
    kept = _greedy(costs, base, holders, limit)
    swapped = _swapped(costs, plain, holders)
    if max(loads_of(costs, kept, base)) > limit:
        return swapped
    return max(swapped, kept, key=lambda owners: _elements_at_owners(owners, holders))


def _elements_at_owners(owners: Sequence[int], holders: Sequence[Mapping[int, int]]) -> int:
    """Return the number of elements that are stored in the shards of their owners."""
    return sum(elements.get(owner, 0) for owner, elements in zip(owners, holders, strict=True))


def _swapped(
    costs: Sequence[float], owners: Sequence[int], holders: Sequence[Mapping[int, int]]
) -> tuple[int, ...]:
    """Reassign items of equal cost, where possible to the ranks that hold most of their elements.

    Every rank keeps the same number of items of each cost as in `owners`, and thus the same load.
    """
    dealt = list(owners)
    for items in grouped(range(len(costs)), lambda item: costs[item]).values():
        slots = Counter(owners[item] for item in items)
        pairs = [
            (-numel, item, rank)
            for item in items
            for rank, numel in holders[item].items()
            if rank in slots
        ]
        left = set(items)
        for _, item, rank in sorted(pairs):
            if item in left and slots[rank]:
                left.discard(item)
                slots[rank] -= 1
                dealt[item] = rank
        for item, rank in zip(sorted(left), sorted(slots.elements()), strict=True):
            dealt[item] = rank
    return tuple(dealt)


def _greedy(
    costs: Sequence[float],
    base: Sequence[float],
    holders: Sequence[Mapping[int, int]],
    limit: float,
) -> tuple[int, ...]:
    owners = [0] * len(costs)
    loads = list(base)
    queue = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(queue)  # entries with stale loads are skipped
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        room = limit - costs[item]
        chosen = max(
            ((numel, -rank) for rank, numel in holders[item].items() if loads[rank] <= room),
            default=None,
        )
        if chosen is not None:
            rank = -chosen[1]
        else:
            while queue[0][0] != loads[queue[0][1]]:
                heapq.heappop(queue)
            rank = queue[0][1]
        loads[rank] += costs[item]
        owners[item] = rank
        heapq.heappush(queue, (loads[rank], rank))
    return tuple(owners)


def loads_of(
    costs: Sequence[float], owners: Sequence[int], base: Sequence[float]
) -> tuple[float, ...]:
    """Return each rank's load: its `base` load plus the costs of its items."""
    loads = list(base)
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return tuple(loads)
