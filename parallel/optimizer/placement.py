"""Placement: which rank of a pipeline stage owns each unit and runs its rule.

`spectral.sharded.placement` chooses; this file says what it costs and who holds what. Ranks are
numbered within a pipeline stage: `stage_rank`.
"""

from collections.abc import Callable, Sequence

from models.units import Unit
from parallel.storage.bucket_layout import BucketLayout, Elementwise
from spectral.sharded.placement import Work


def stage_rank(data_rank: int, tensor_rank: int, tensor_size: int) -> int:
    """Rank within the pipeline stage: tensor ranks are neighbours, as in megatron-core."""
    return data_rank * tensor_size + tensor_rank


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
                holders[stage_rank(data_rank, tensor_rank, len(units))] = numel
    return [Work(name, costs[name], found[name]) for name in sorted(found)]


def inspection_ranks(units: Sequence[Sequence[Unit]], ranks: int) -> dict[str, int]:
    """Choose the rank, of the `ranks` of a stage, that inspects the matrices of each parameter.

    `units` are those of each tensor-parallel rank. The costliest parameters are placed first, each
    on the rank with the smallest load so far.
    """
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
