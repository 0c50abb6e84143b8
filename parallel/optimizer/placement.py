"""Placement: which rank of a pipeline stage owns each unit and runs its rule.

`spectral.sharded.placement` chooses; this file says what it costs and who holds what. Ranks are
numbered within a pipeline stage; tensor ranks are neighbours, as in megatron-core.
"""

from collections.abc import Callable, Sequence

from models.units import Unit
from parallel.storage.bucket_layout import BucketLayout, Elementwise
from spectral.sharded.placement import Work


def unit_work(
    units: Sequence[Sequence[Unit]],
    bucket_layout: BucketLayout,
    *,
    elementwise: Elementwise,
    cost: Callable[[Unit], float],
) -> list[Work]:
    """Collect cost and holders of every unit of a stage that has an owner, names ascending.

    Args:
        units: of each tensor-parallel rank of the stage, ranks ascending.
        bucket_layout: of the stage, the same on every tensor-parallel rank.
        elementwise: whether a unit's rule is elementwise; those units have no owner.
        cost: FLOPs per step of a unit.
    """
    found: dict[str, dict[int, int]] = {}
    costs: dict[str, float] = {}
    local: dict[str, dict[int, int]] = {}
    for tensor_rank, members in enumerate(units):
        for unit in members:
            if elementwise(unit):
                continue
            if unit.name not in local:
                local[unit.name] = bucket_layout.holders(unit)
                costs[unit.name] = cost(unit)
            holders = found.setdefault(unit.name, {})
            for data_rank, numel in local[unit.name].items():
                holders[data_rank * len(units) + tensor_rank] = numel
    return [Work(name, costs[name], found[name]) for name in sorted(found)]
