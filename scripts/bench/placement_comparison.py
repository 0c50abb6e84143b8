"""How well the ways to place matrices spread a model's work, by the planner's pure functions."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.size import all_units
from models.units import Unit
from parallel.optimizer.cost import assigned_cost
from parallel.optimizer.placement import Strategy, loads_of, ping_pong, place, unit_work
from parallel.storage.bucket_layout import plan_bucket_layout
from parallel.storage.grouping import units_by_parameter
from training.assignments import unit_options
from training.build import config_assignments
from training.config import Config
from training.dry_run import table

STRATEGIES: tuple[Strategy, ...] = ("ping_pong", "longest_processing_time", "round_robin", "auto")


@dataclass(frozen=True)
class PlacementRow:
    """One line of the placement table: loads in FLOPs, relative; moved as a share of all matrices'
    elements, None where whole gradients are on every rank anyway."""

    ranks: int
    strategy: str
    chosen: str
    max_over_mean: float
    max_over_bound: float
    moved: float | None
    seconds: float


def compare_placements(config: Config, rank_counts: Sequence[int]) -> Iterator[PlacementRow]:
    """A row per strategy and number of ranks, for pure data parallelism; the last row of each
    number deals whole parameters by element counts, as the layer-wise scheme does.

    Raises ValueError if no rule of the config works on whole matrices.
    """
    units = all_units(config.model, **unit_options(config))
    assign = config_assignments(config)

    def elementwise(unit: Unit) -> bool:
        return not assign(unit).whole_matrix

    def cost(unit: Unit) -> float:
        return 0.0 if elementwise(unit) else assigned_cost(unit.shape, assign(unit))

    if all(map(elementwise, units)):
        raise ValueError(f"config must have a rule of whole matrices, got {config.run.name}")
    for ranks in rank_counts:
        layout = plan_bucket_layout(units, ranks=ranks, elementwise=elementwise, tensor_size=1)
        works = unit_work([units], layout, elementwise=elementwise, cost=cost)
        numel = sum(work.numel for work in works)
        for strategy in STRATEGIES:
            placed, seconds = timed(partial(place, strategy, works, ranks))
            best = max(placed.loads) / placed.bound
            share = placed.moved / numel
            yield PlacementRow(
                ranks, strategy, placed.strategy, placed.imbalance, best, share, seconds
            )
        loads, seconds = timed(partial(whole_parameter_loads, units, cost, ranks))
        even, best = max(loads) * ranks / sum(loads), max(loads) / placed.bound
        yield PlacementRow(ranks, "whole parameters", "ping_pong", even, best, None, seconds)


def whole_parameter_loads(
    units: Sequence[Unit], cost: Callable[[Unit], float], ranks: int
) -> tuple[float, ...]:
    """FLOPs of each rank where whole parameters are dealt by ping-pong on element counts."""
    members = list(units_by_parameter(units).values())
    owners = ping_pong([sum(unit.numel for unit in each) for each in members], ranks)
    costs = [sum(map(cost, each)) for each in members]
    return loads_of(costs, owners, [0.0] * ranks)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What `call` returns, and its seconds."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def placement_table(rows: Sequence[PlacementRow]) -> str:
    """The rows as text."""
    header = ("ranks", "placement", "used", "max/mean load", "max/bound", "moved", "seconds")
    return table(
        header,
        [
            (
                row.ranks,
                row.strategy,
                row.chosen,
                f"{row.max_over_mean:.3f}",
                f"{row.max_over_bound:.3f}",
                "" if row.moved is None else f"{row.moved:.1%}",
                f"{row.seconds:.3f}",
            )
            for row in rows
        ],
    )
