"""From a built model to its distributed optimizer: homes, journeys, and agreement about them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from models.units import Unit
from parallel.cost import unit_cost
from parallel.exchange import plan_journeys
from parallel.groups import Groups
from parallel.model import ParallelModel
from parallel.optimizer import DistributedOptimizer
from parallel.placement import Placement, Strategy, place, unit_work
from parallel.routing import Assign


class DisagreementError(RuntimeError):
    """Ranks that must have the same plan do not."""


def build_optimizer(
    model: ParallelModel,
    assign: Assign,
    groups: Groups,
    *,
    placement: Strategy = "auto",
    step_groups: int = 4,
    wire: torch.dtype | None = None,
    overlap_gather: bool = True,
) -> DistributedOptimizer:
    """The optimizer of `model`, every matrix of a pipeline stage with one home.

    Raises ValueError if a whole-matrix rule is assigned to something that is no matrix,
    DisagreementError if the ranks of a stage have planned differently.
    """
    check_assignments(model.units, assign)
    placed = place_units(model, assign, groups, placement)
    check_agreement([model.buffers.layout.digest(), placed.digest()], groups)
    journeys = plan_journeys(model.stage_units, model.buffers.layout, placed.homes)
    return DistributedOptimizer(
        model,
        assign,
        groups,
        journeys,
        step_groups=step_groups,
        wire=wire,
        overlap_gather=overlap_gather,
    )


def place_units(
    model: ParallelModel, assign: Assign, groups: Groups, strategy: Strategy
) -> Placement:
    """The home of every unit of this rank's pipeline stage that a whole-matrix rule updates."""
    works = unit_work(
        model.stage_units,
        model.buffers.layout,
        elementwise=lambda unit: not assign(unit.role).rule.whole_matrix,
        cost=lambda unit: unit_cost(unit.shape, assign(unit.role).rule),
    )
    return place(strategy, works, groups.stage.size)


def check_assignments(units: Sequence[Unit], assign: Assign) -> None:
    """None; raises ValueError if a whole-matrix rule is assigned to a unit that is no matrix."""
    for unit in units:
        assigned = assign(unit.role)
        if assigned.rule.whole_matrix and not unit.is_matrix:
            raise ValueError(
                f"rule {assigned.rule_name} needs matrices, but role {unit.role} has {unit.name} "
                f"of shape {unit.shape}"
            )


def check_agreement(digests: Sequence[str], groups: Groups) -> None:
    """None; raises DisagreementError unless all ranks of the stage have the same digests."""
    mine = torch.frombuffer(bytearray("".join(digests).encode()), dtype=torch.uint8)
    mine = mine.to(groups.device)
    everyone = [torch.empty_like(mine) for _ in range(groups.stage.size)]
    dist.all_gather(everyone, mine, group=groups.stage.group)
    different = [rank for rank, theirs in enumerate(everyone) if not torch.equal(theirs, mine)]
    if different:
        raise DisagreementError(
            f"layout or placement differs between rank {groups.stage.rank} and ranks "
            f"{', '.join(map(str, different))} of the same pipeline stage"
        )
