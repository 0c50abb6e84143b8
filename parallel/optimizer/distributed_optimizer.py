"""The distributed optimizer: every matrix is updated by its owner rank, once per step.

Elementwise state is sharded evenly across ranks. domain_optimizer.py describes a step. Dense
parameters and experts are separate domains, because they are replicated across different ranks.

`Update` clips and steps in one call, which can be captured as a single CUDA graph on a GPU. NCCL
collectives can only be captured if all ranks capture the same collectives, so every rank calls
`Update` the same number of times before capture. The graph waits for all work that it launches,
including the all-gathers of new weights.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.units import Unit
from parallel.comm.collectives import CommVolume, all_reduce_, from_all
from parallel.comm.groups import Axis
from parallel.model import ParallelModel
from parallel.optimizer.domain_optimizer import DomainOptimizer
from parallel.optimizer.materialized_pc import MaterializedStack
from parallel.optimizer.owned_stacks import OwnedStack, StepOptions
from parallel.optimizer.penalty_gradient import PenaltyFigures
from parallel.optimizer.routing import Assign, unit_work
from parallel.optimizer.unit_transfer import TensorMode, plan_transfers, shardwise
from spectral.cuda_graph import CapturedCall
from spectral.rules.base import Report
from spectral.sharded.placement import Strategy, place


@dataclass(frozen=True)
class GradientNorm:
    """The gradient norm of one step, as 0-d device tensors.

    total         global gradient norm before clipping
    coefficient   clipping factor applied to the gradients
    active        bool: whether the norm is finite and all ranks allow the step
    """

    total: Tensor
    coefficient: Tensor
    active: Tensor


@dataclass(eq=False)
class DistributedOptimizer:
    """Optimizer that updates every unit of the model with the rule for its role.

    owners          global rank of the owner of each matrix in this rank's pipeline stage, by name
    overlap_gather  whether `step` returns before all new weights have arrived; each module waits
                    for its own weights before its next forward pass, and `model.wait_for_weights`
                    waits for all of them
    """

    model: ParallelModel
    domains: Sequence[DomainOptimizer]
    owners: Mapping[str, int]
    overlap_gather: bool

    @property
    def stacks(self) -> list[OwnedStack]:
        """All matrix stacks owned by this rank."""
        return [stack for domain in self.domains for stack in domain.stacks]

    @property
    def materialized(self) -> list[MaterializedStack]:
        """All PC layer stacks owned by this rank."""
        return [stack for stack in self.stacks if isinstance(stack, MaterializedStack)]

    @torch.no_grad()
    def add_penalty(self, *, enabled: bool, measured: bool) -> PenaltyFigures | None:
        """Add the Gram penalty's gradient to the loss gradient if `enabled`.

        Call this once per step, after the backward pass and before `clip`. If `measured`, returns
        the penalty metrics, at the cost of a collective and a host sync.
        """
        self.model.wait_for_weights()
        groups = [group for domain in self.domains for group in domain.step_groups]
        parts = [group.penalised.add_(enabled=enabled, measured=measured) for group in groups]
        sums = [figures for figures in parts if figures is not None]
        if not sums:
            return None
        total = torch.stack(sums).sum(0)
        all_reduce_(total, None, self.model.comm_volume, "penalty figures")
        value, shares, units, squares, loss_squares = total.tolist()
        return PenaltyFigures(value, shares / max(1.0, units), squares**0.5, loss_squares**0.5)

    @torch.no_grad()
    def clip(self, max_norm: float | None, sound: Tensor | None = None) -> GradientNorm:
        """Clip the gradients in place to `max_norm` and return their norm before clipping.

        If `max_norm` is None, gradients are not clipped. `sound`, a 0-d bool tensor, is True if
        this rank allows the step. The returned `active` is True only if the norm is finite and all
        ranks allow the step.
        """
        some = self.domains[0].model.gradients[0]
        dtype = torch.promote_types(some.dtype, torch.float32)
        square = torch.zeros((), dtype=dtype, device=some.device)
        refusals = torch.zeros_like(square) if sound is None else (~sound).to(dtype)
        gradients = list(self._gradients())
        measured = [gradient for in_norm, gradient in gradients if in_norm]
        if measured:
            square += torch.stack(torch._foreach_norm(measured, dtype=dtype)).square().sum()
        sums = torch.stack([square, refusals])
        all_reduce_(sums, None, self.model.comm_volume, "gradient norm")
        total = sums[0].sqrt()
        active = (sums[1] == 0) & (total < math.inf)  # also False for NaN
        if max_norm is None:
            return GradientNorm(total, torch.ones_like(total), active)
        coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
        if gradients:
            torch._foreach_mul_([gradient for _, gradient in gradients], coefficient)
        return GradientNorm(total, coefficient, active)

    def _gradients(self) -> Iterator[tuple[bool, Tensor]]:
        """Yield (in_norm, gradient) for this rank's gradients, where `in_norm` tells whether this
        rank counts the gradient in the norm."""
        for domain in self.domains:
            shards = domain.model.gradient_shards()
            for region in domain.regions:
                yield region.in_norm, region.of(shards)
            for units in domain.materialized:
                for stack, gradients in units.gradients():
                    yield from ((True, gradient) for gradient in gradients)
                    if stack.pc.gamma_rule is not None:
                        yield True, stack.gamma_gradient

    @torch.no_grad()
    def step(self, factor: Tensor | float, active: Tensor) -> None:
        """Update every unit once.

        `factor` scales each unit's peak learning rate. If `active`, a 0-d bool tensor, is False,
        all weights and state remain bitwise unchanged. If `active` is True, gradients must be
        finite (see `clip`).
        """
        self.model.wait_for_weights()
        rate = cache(lambda peak: peak * factor)  # units with equal peak rates share a tensor
        for domain in self.domains:
            for group in domain.step_groups:
                momenta = domain.step_regions(group, rate, active)
                domain.step_matrices(group, momenta, rate, active)
                group.materialized.step(rate, active)
                domain.model.start_gathers(group.buckets, self.model.comm_volume)
        self.model.refresh_in_graph(active)
        if not self.overlap_gather:
            self.model.wait_for_weights()

    @torch.no_grad()
    def guard_pc(self) -> tuple[Tensor, Tensor]:
        """Return the largest normalised singular value and the gamma of each unit in PC layers,
        both `[units]`.

        The result covers the materialized PC layers that this rank owns. Each in-graph PC layer is
        included on only one of the ranks that hold the layer. Correct singular values are in [0,
        1.1]. Tracked singular vectors that do not belong to the largest singular value are
        replaced. Only call this on logging steps, because it costs about fifty passes over the
        weights. Collective over the stage.
        """
        self.model.wait_for_weights()
        seen, gammas = self.model.guard_in_graph()
        for stack in self.materialized:
            seen.append(stack.guard_())
            gammas.append(stack.gamma[:, 0])
        none = torch.zeros(0, device=self.domains[0].model.master.device)
        return torch.cat([none, *seen]).float(), torch.cat([none, *gammas]).float()

    def reports(self) -> Iterator[tuple[Unit, Report]]:
        """Yield (unit, last report of its rule) for each matrix that this rank owns. A report is a
        dict of 0-d tensors."""
        for stack in self.stacks:
            for i, unit in enumerate(stack.units):
                yield unit, {key: value[i] for key, value in stack.report.items()}

    def refused(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, refused) for each owned matrix and each elementwise region on this rank.

        `refused` is a 0-d tensor: 1 if the last update was refused, 0 otherwise. Matrices and
        regions whose rule does not report refusals are omitted.
        """
        for unit, report in self.reports():
            if "refused" in report:  # missing before a stack's first step
                yield unit.name, report["refused"]
            if "gamma_refused" in report:
                yield f"{unit.name}.gamma", report["gamma_refused"]
        for domain in self.domains:
            for region in domain.regions:
                if "refused" in region.report:
                    location = f"{domain.domain.name}.{region.bucket}.{region.start}"
                    name = f"{region.assigned.rule_name} elements {location}"
                    yield name, region.report["refused"][0]

    @torch.no_grad()
    def rescalings(self) -> dict[str, tuple[str, float]]:
        """Return (rule name, factor) for each matrix whose rule rescales the matrix to a radius,
        keyed by matrix name. Materialized PC layers are omitted. The factor is this radius divided
        by the spectral norm of the current weight. Collective."""
        self.model.wait_for_weights()
        found = {
            unit.name: (rule, factor)
            for domain in self.domains
            for unit, rule, factor in domain.rescalings()
        }
        return {name: each for part in from_all(found) for name, each in part.items()}

    def memory_bytes(self) -> int:
        """Return the number of bytes of optimizer state and separate master weights on this
        rank."""
        return sum(domain.memory_bytes() for domain in self.domains)


class DisagreementError(RuntimeError):
    """Raised when ranks disagree on plans or values that must be the same on all of them."""


def build_optimizer(
    model: ParallelModel,
    assign: Assign,
    *,
    placement: Strategy = "auto",
    overlap_gather: bool = True,
    tensor_mode: TensorMode = "owner",
    **options: Any,
) -> DistributedOptimizer:
    """Build the optimizer for `model`, and choose an owner rank for each matrix in a pipeline
    stage.

    Args:
        model: this rank's part of the model.
        assign: function that returns a unit's rule, rates and penalty.
        placement: strategy for choosing owners.
        overlap_gather: whether `step` returns before new weights have arrived.
        tensor_mode: see `TensorMode`.
        **options: fields of `StepOptions`.

    Raises DisagreementError if the plans differ across the ranks of a stage.
    """
    domains: list[DomainOptimizer] = []
    owners: dict[str, int] = {}
    loads: dict[int, float] = {}  # loads of earlier domains, by global rank
    for part in model.domains:
        if tensor_mode == "shardwise":
            part.stage_units = shardwise(part.stage_units, lambda unit: assign(unit).whole_matrix)
        layout = part.bucket_layout
        works = unit_work(part.stage_units, layout, assign)
        ranks = dist.get_process_group_ranks(part.domain.stage.group)
        # A rank may own both dense matrices and experts, so place experts on top of the dense load.
        base = [loads.get(rank, 0.0) for rank in ranks]
        placed = place(placement, works, len(ranks), base=base)
        check_agreement((layout, placed.owners), part.domain.stage)
        loads |= zip(ranks, placed.loads, strict=True)
        owners |= {name: ranks[owner] for name, owner in placed.owners.items()}
        transfers = plan_transfers(part.stage_units, layout, placed.owners)
        step = StepOptions(**options)
        domains.append(DomainOptimizer(part, assign, transfers, step))
    return DistributedOptimizer(model, domains, owners, overlap_gather=overlap_gather)


def check_agreement(plan: object, stage: Axis) -> None:
    """Raise DisagreementError if the plans differ across the stage's ranks."""
    digest = hashlib.sha256(repr(plan).encode()).hexdigest()
    digests = from_all(digest, stage.group)
    different = [rank for rank, other in enumerate(digests) if other != digest]
    if different:
        raise DisagreementError(
            f"bucket layout or placement differs between rank {stage.rank} and ranks "
            f"{', '.join(map(str, different))} of the same pipeline stage"
        )


class Update:
    """Computes the gradient norm, clips, decides whether to step, and updates all weights once."""

    def __init__(self, optimizer: DistributedOptimizer, *, max_norm: float | None) -> None:
        """Prepare the update. For `max_norm`, see `DistributedOptimizer.clip`."""
        self.optimizer = optimizer
        self.max_norm = max_norm
        self.device = optimizer.domains[0].model.master.device

    def __call__(self, factor: float | Tensor, sound: Tensor) -> GradientNorm:
        """Clip, step, and return the norm before clipping.

        `factor` scales every unit's peak learning rate. Weights are only updated if the norm is
        finite and `sound`, a 0-d bool tensor, is True on all ranks.
        """
        if not isinstance(factor, Tensor):  # float32, to match the rates of a captured step
            factor = torch.full((), factor, device=self.device)
        norm = self.optimizer.clip(self.max_norm, sound)
        self.optimizer.step(factor, norm.active)
        return norm

    def release(self) -> None:
        """Free any resources that must not outlive the process groups."""


class CapturedUpdate(Update):
    """An update that is replayed as a CUDA graph from the third call on."""

    def __init__(self, optimizer: DistributedOptimizer, *, max_norm: float | None) -> None:
        """Prepare the update. The config checks ensure that a step can be captured: it must gather
        all weights (`overlap_gather` is False) and must not synchronize with the host."""
        super().__init__(optimizer, max_norm=max_norm)
        # Filled in place before each call, so that graph replays read the new values.
        self.factor = torch.ones((), device=self.device)
        self.sound = torch.ones((), dtype=torch.bool, device=self.device)
        self._captured = CapturedCall(self._run, self.device)
        self._done: GradientNorm | None = None
        self._sent = CommVolume()  # bytes sent by the captured call, and thus by every replay

    def __call__(self, factor: float | Tensor, sound: Tensor) -> GradientNorm:
        """Clip and step like `Update`."""
        self.factor.fill_(factor)
        self.sound.copy_(sound)
        comm_volume = self.optimizer.model.comm_volume
        before = comm_volume.copy()
        if self._captured():
            self._sent = comm_volume - before
        else:
            comm_volume.update(self._sent)
        norm = self._done
        assert norm is not None
        # The next replay would overwrite the results.
        return GradientNorm(norm.total.clone(), norm.coefficient.clone(), norm.active.clone())

    def release(self) -> None:
        """Free the CUDA graph. Call this before destroying the process groups that the graph
        uses."""
        self._captured.release()

    def _run(self) -> None:
        self._done = super().__call__(self.factor, self.sound)
