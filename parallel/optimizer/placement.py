"""Placement: which rank of a pipeline stage owns each unit and runs its rule.

`spectral.sharded.placement` chooses; this file says what it costs and who holds what. Ranks are
numbered within a pipeline stage; tensor ranks are neighbours, as in megatron-core.
"""

from collections.abc import Sequence
from functools import cache

from models.units import Unit
from parallel.optimizer.routing import Assign, Assignment
from parallel.storage.bucket_layout import BucketLayout
from spectral.sharded.placement import Work


def unit_work(
    units: Sequence[Sequence[Unit]], bucket_layout: BucketLayout, assign: Assign
) -> list[Work]:
    """Collect cost and holders of every unit of a stage that has an owner, names ascending.

    Args:
        units: of each tensor-parallel rank of the stage, ranks ascending.
        bucket_layout: of the stage, the same on every tensor-parallel rank.
        assign: rule and penalty of each unit; units that no rank needs whole have no owner.
    """
    cost = cache(Assignment.cost)  # units of one shape share it
    holders_of: dict[str, dict[int, int]] = {}
    costs: dict[str, float] = {}
    local: dict[str, dict[int, int]] = {}
    for tensor_rank, members in enumerate(units):
        for unit in members:
            assigned = assign(unit)
            if not assigned.whole_matrix:
                continue
            if unit.name not in local:
                local[unit.name] = bucket_layout.holders(unit)
                costs[unit.name] = cost(assigned, unit.shape)
            holders = holders_of.setdefault(unit.name, {})
            for data_rank, numel in local[unit.name].items():
                holders[data_rank * len(units) + tensor_rank] = numel
    return [Work(name, costs[name], holders_of[name]) for name in sorted(holders_of)]
