"""Builds the distributed optimizer of a model: owners, transfers, and agreement about them."""

import hashlib

import torch
import torch.distributed as dist

from parallel.comm.collectives import from_all
from parallel.comm.groups import Axis
from parallel.model import ParallelModel
from parallel.optimizer.domain_optimizer import DomainOptimizer
from parallel.optimizer.exchange import TensorMode, plan_transfers, shardwise
from parallel.optimizer.optimizer import DistributedOptimizer
from parallel.optimizer.placement import unit_work
from parallel.optimizer.routing import Assign
from spectral.sharded.placement import Strategy, place


class DisagreementError(RuntimeError):
    """Ranks that must hold the same plan, or the same values, do not."""


def build_optimizer(
    model: ParallelModel,
    assign: Assign,
    *,
    placement: Strategy = "auto",
    step_groups: int | None = None,
    exchange_dtype: torch.dtype | None = None,
    overlap_gather: bool = True,
    tensor_mode: TensorMode = "owner",
    momentum_dtype: torch.dtype | None = None,
) -> DistributedOptimizer:
    """Build the optimizer of `model`, with one owner for every matrix of a pipeline stage.

    Args:
        model: this rank's part of the model.
        assign: rule, rates and penalty of each unit.
        placement: how owners are chosen.
        step_groups: most groups of buckets that a step is cut into; None as in
            `BucketLayout.step_groups`.
        exchange_dtype: dtype in which momentum and updates are sent; None for their own.
        overlap_gather: whether `step` returns before new weights have arrived.
        tensor_mode: who steps the matrices that tensor parallelism cuts.
        momentum_dtype: dtype of the momentum of whole-matrix rules; None for the masters'.

    Raises DisagreementError if the ranks of a stage have made different plans.
    """
    domains: list[DomainOptimizer] = []
    owners: dict[str, int] = {}
    base: list[float] | None = None
    expert_tensor = model.domains[-1].domain.tensor.size
    for part in model.domains:
        if tensor_mode == "shardwise":
            part.stage_units = shardwise(part.stage_units, lambda unit: assign(unit).whole_matrix)
        layout = part.buffers.bucket_layout
        works = unit_work(part.stage_units, layout, assign)
        placed = place(placement, works, part.domain.stage.size, base=base)
        plan = layout, placed.strategy, placed.owners
        check_agreement(plan, part.domain.stage)
        # Ranks own dense matrices and experts; experts are placed last, on top of the loads of the
        # ranks that hold the same experts as this one.
        base = [
            load
            for i, load in enumerate(placed.loads)
            if i // expert_tensor % model.expert.size == model.expert.rank
        ]
        group = part.domain.stage.group
        owners |= {name: dist.get_global_rank(group, rank) for name, rank in placed.owners.items()}
        transfers = plan_transfers(part.stage_units, layout, placed.owners)
        domains.append(
            DomainOptimizer(
                part,
                model.parameters,
                assign,
                transfers,
                step_groups=step_groups,
                exchange_dtype=exchange_dtype,
                momentum_dtype=momentum_dtype,
            )
        )
    return DistributedOptimizer(model, domains, owners, overlap_gather=overlap_gather)


def check_agreement(plan: object, stage: Axis) -> None:
    """Raise DisagreementError unless all ranks of the stage have made the same plan."""
    digest = hashlib.sha256(repr(plan).encode()).hexdigest()
    everyone = from_all(digest, stage.group)
    different = [rank for rank, theirs in enumerate(everyone) if theirs != digest]
    if different:
        raise DisagreementError(
            f"bucket layout or placement differs between rank {stage.rank} and ranks "
            f"{', '.join(map(str, different))} of the same pipeline stage"
        )
