"""Which rank spans each unit's rule: its owner.

Pure functions of costs, sizes and of who holds what; every rank computes the same answer, and
`Placement.digest` lets them compare. Ranks are those of one pipeline stage's data x tensor group:
`group_rank`.
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from models.units import Unit
from parallel.storage.bucket_layout import BucketLayout, Elementwise

Strategy = Literal["auto", "ping_pong", "longest_processing_time", "round_robin"]

SLACK = 0.02
"""Share of the largest load that may be given up so that more units stay where they are held."""


@dataclass(frozen=True)
class Work:
    """What placement knows of a unit: its cost in FLOPs per step, and how many of its elements each
    rank holds after the reduce-scatter."""

    name: str
    cost: float
    holders: Mapping[int, int]

    @property
    def numel(self) -> int:
        """Elements of the whole unit."""
        return sum(self.holders.values())


@dataclass(frozen=True)
class Placement:
    """Homes of the units of one stage.

    strategy   the one that was used; of `auto`, the one it chose
    owners      rank of the group by unit name, names ascending
    loads      summed cost of each rank, FLOPs per step, with what it had to do before
    moved      elements whose momentum travels to an owner on another rank
    bound      no placement whatsoever has a smaller largest load (`load_bound`)
    """

    strategy: str
    owners: dict[str, int]
    loads: tuple[float, ...]
    moved: int
    bound: float

    @property
    def imbalance(self) -> float:
        """Largest over mean load; 1 if there is nothing to do."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0

    def digest(self) -> str:
        """SHA-256 of strategy and owners, for comparison between ranks."""
        content = (self.strategy, len(self.loads), sorted(self.owners.items()))
        return hashlib.sha256(repr(content).encode()).hexdigest()


def group_rank(data_rank: int, tensor_rank: int, tensor_size: int) -> int:
    """Rank in the data x tensor group: tensor ranks are neighbours, as in megatron-core."""
    return data_rank * tensor_size + tensor_rank


def unit_work(
    units: Sequence[Sequence[Unit]],
    layout: BucketLayout,
    *,
    elementwise: Elementwise,
    cost: Callable[[Unit], float],
) -> list[Work]:
    """The work of every whole-matrix unit of a stage, by name.

    Args:
        units: of each tensor rank of the stage, in order of rank.
        layout: of the stage, the same on every tensor rank.
        elementwise: whether a unit's rule is elementwise; those units have no owner.
        cost: FLOPs per step of a unit.
    """
    held: dict[str, dict[int, int]] = {}
    costs: dict[str, float] = {}
    local: dict[str, dict[int, int]] = {}
    for tensor_rank, members in enumerate(units):
        for unit in members:
            if elementwise(unit):
                continue
            if unit.name not in local:
                local[unit.name] = layout.holders(unit)
                costs[unit.name] = cost(unit)
            holders = held.setdefault(unit.name, {})
            for data_rank, numel in local[unit.name].items():
                holders[group_rank(data_rank, tensor_rank, len(units))] = numel
    return [Work(name, costs[name], held[name]) for name in sorted(held)]


def inspection_ranks(units: Sequence[Sequence[Unit]], ranks: int) -> dict[str, int]:
    """The rank of a stage of `ranks` that looks at the matrices of each parameter, given the units
    of its tensor ranks; the heaviest first, each to the rank that has least so far."""
    costs: dict[str, int] = {}
    for members in units:
        for unit in {each.name: each for each in members if each.is_matrix}.values():
            short, long = sorted(unit.shape)
            costs[unit.parameter] = costs.get(unit.parameter, 0) + short * short * (long + short)
    loads = [0] * ranks
    found: dict[str, int] = {}
    for parameter, cost in sorted(costs.items(), key=lambda item: (-item[1], item[0])):
        found[parameter] = rank = loads.index(min(loads))
        loads[rank] += cost
    return found


def place(
    strategy: Strategy,
    works: Sequence[Work],
    ranks: int,
    *,
    slack: float = SLACK,
    base: Sequence[float] | None = None,
) -> Placement:
    """The owners of `works` among `ranks` ranks. Ties are broken by the units' names.

    `base` is what each rank has to do already: the experts of a stage are placed after its dense
    matrices. Only longest_processing_time levels it out.

    auto tries all, and of those whose largest load is within `slack` of the least takes the one
    that moves the fewest elements.

    Raises ValueError for an unknown strategy, ranks below 1, a base of another length, or two units
    of one name.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    base = [0.0] * ranks if base is None else base
    if len(base) != ranks:
        raise ValueError(f"base must have a load for each of {ranks} ranks, got {len(base)}")
    works = sorted(works, key=lambda work: work.name)
    costs = [work.cost for work in works]
    sizes = [work.numel for work in works]
    holders = [work.holders for work in works]
    strategies: dict[str, Callable[[], tuple[int, ...]]] = {
        "longest_processing_time": lambda: longest_processing_time(
            costs, ranks, holders=holders, slack=slack, base=base
        ),
        "ping_pong": lambda: ping_pong(sizes, ranks),
        "round_robin": lambda: round_robin(sizes, ranks),
    }
    if strategy != "auto" and strategy not in strategies:
        raise ValueError(f"strategy must be one of auto, {', '.join(strategies)}, got {strategy!r}")
    if len({work.name for work in works}) != len(works):
        raise ValueError("units must have different names")
    bound = max(load_bound(costs, ranks), (sum(base) + sum(costs)) / ranks, *base)
    tried = [
        _placement(name, works, strategies[name](), base, bound)
        for name in (strategies if strategy == "auto" else (strategy,))
    ]
    limit = min(max(placement.loads) for placement in tried) * (1 + slack)
    return min(
        (placement for placement in tried if max(placement.loads) <= limit),
        key=lambda placement: placement.moved,
    )


def _placement(
    strategy: str,
    works: Sequence[Work],
    ranks: Sequence[int],
    base: Sequence[float],
    bound: float,
) -> Placement:
    owners = {work.name: rank for work, rank in zip(works, ranks, strict=True)}
    loads = loads_of([work.cost for work in works], ranks, base)
    moved = sum(work.numel - work.holders.get(owners[work.name], 0) for work in works)
    return Placement(strategy, owners, loads, moved, bound)


def round_robin(sizes: Sequence[float], ranks: int) -> tuple[int, ...]:
    """Owners of items dealt in the order given."""
    return tuple(i % ranks for i in range(len(sizes)))


def ping_pong(sizes: Sequence[float], ranks: int) -> tuple[int, ...]:
    """Owners of items dealt by ascending size to ranks 0 ... n-1, then n-1 ... 0, and so on
    ("Controlled LLM Training on Spectral Sphere"). Ties keep the order given."""
    owners = [0] * len(sizes)
    for i, item in enumerate(sorted(range(len(sizes)), key=lambda item: sizes[item])):
        lap, place_in_lap = divmod(i, ranks)
        owners[item] = place_in_lap if lap % 2 == 0 else ranks - 1 - place_in_lap
    return tuple(owners)


def longest_processing_time(
    costs: Sequence[float],
    ranks: int,
    *,
    holders: Sequence[Mapping[int, int]] | None = None,
    slack: float = SLACK,
    base: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Owners of items dealt by descending cost, each to the least loaded rank.

    The largest load is at most 4/3 of the best one (Graham, 1969), if ranks start without a load
    `base`. Ties go to the lower rank and keep the order given.

    With `holders`, the elements of each item that ranks hold, two ways to keep items where they are
    are tried, and the one that keeps more elements is taken: items of equal cost change places, or
    each item goes to the rank that holds most of it as long as no load exceeds `1 + slack` of the
    largest one without `holders`.
    """
    base = [0.0] * ranks if base is None else base
    plain = _greedy(costs, base, [{}] * len(costs), 0.0)
    if holders is None:
        return plain
    limit = max(loads_of(costs, plain, base)) * (1 + slack)
    kept = _greedy(costs, base, holders, limit)
    swapped = _swapped(costs, plain, holders)
    if max(loads_of(costs, kept, base)) > limit:
        return swapped
    return max(swapped, kept, key=lambda owners: _held(owners, holders))


def _held(owners: Sequence[int], holders: Sequence[Mapping[int, int]]) -> int:
    """Elements that their owners hold."""
    return sum(held.get(owner, 0) for owner, held in zip(owners, holders, strict=True))


def _swapped(
    costs: Sequence[float], owners: Sequence[int], holders: Sequence[Mapping[int, int]]
) -> tuple[int, ...]:
    """`owners` with items of equal cost dealt anew, to the ranks that hold most of them first;
    every rank gets as many of each cost as before, so all loads stay."""
    classes: dict[float, list[int]] = {}
    for item, cost in enumerate(costs):
        classes.setdefault(cost, []).append(item)
    found = list(owners)
    for items in classes.values():
        room = Counter(owners[item] for item in items)
        pairs = [
            (-held, item, rank)
            for item in items
            for rank, held in holders[item].items()
            if rank in room
        ]
        left = set(items)
        for _, item, rank in sorted(pairs):
            if item in left and room[rank]:
                left.discard(item)
                room[rank] -= 1
                found[item] = rank
        for item, rank in zip(sorted(left), sorted(room.elements()), strict=True):
            found[item] = rank
    return tuple(found)


def _greedy(
    costs: Sequence[float],
    base: Sequence[float],
    holders: Sequence[Mapping[int, int]],
    limit: float,
) -> tuple[int, ...]:
    owners = [0] * len(costs)
    loads = list(base)
    queue = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(queue)  # entries with an outdated load are skipped
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        room = limit - costs[item]
        chosen = max(
            ((held, -rank) for rank, held in holders[item].items() if loads[rank] <= room),
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
    """Summed cost of each rank, on top of its load `base`."""
    loads = list(base)
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return tuple(loads)


def load_bound(costs: Sequence[float], ranks: int) -> float:
    """A largest load that no placement falls below: the mean load, and for every k the sum of
    the k + 1 smallest of the k * ranks + 1 largest items, since some rank gets so many of them."""
    ordered = sorted(costs, reverse=True)
    crowded = (
        sum(ordered[k * ranks - k : k * ranks + 1]) for k in range(-(-len(ordered) // ranks))
    )
    return max([sum(ordered) / ranks, *crowded])
