"""The distributed optimizer: every matrix stepped once, by the rank that is its owner.

Each rank keeps an even share of the state of every parameter; `parallel.optimizer.domain_optimizer`
says how a step goes. Dense parameters and experts are two domains, copied over different ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.units import Unit
from parallel.comm.collectives import all_reduce_
from parallel.model import ParallelModel
from parallel.optimizer.domain_optimizer import DomainOptimizer, Region
from parallel.optimizer.owned_stacks import OwnedStack
from parallel.optimizer.penalty_gradient import PenaltyFigures
from spectral.rules.base import Report


@dataclass(frozen=True)
class GradientNorm:
    """total is the norm of the whole gradient, coefficient what the clipped part is multiplied by.
    Both are 0-d device tensors."""

    total: Tensor
    coefficient: Tensor


class DistributedOptimizer:
    """Steps every unit of the model, each once, by the rule of its role."""

    def __init__(
        self,
        model: ParallelModel,
        domains: Sequence[DomainOptimizer],
        owners: Mapping[str, int],
        *,
        overlap_gather: bool = True,
    ) -> None:
        """`owners` is the global rank that steps each matrix of this rank's stages.

        With `overlap_gather`, `step` returns while new weights are on their way; each module waits
        for its own before its next forward, and `model.wait_for_weights` for all.
        """
        self.model = model
        self.domains = domains
        self.owners = owners
        self.overlap_gather = overlap_gather

    @property
    def batches(self) -> list[OwnedStack]:
        """Every batch of matrices this rank steps."""
        return [batch for domain in self.domains for batch in domain.batches]

    @property
    def regions(self) -> list[Region]:
        """Every region of this rank's shards."""
        return [region for domain in self.domains for region in domain.regions]

    @torch.no_grad()
    def add_penalty(self, *, acts: bool, measured: bool) -> PenaltyFigures | None:
        """The Gram penalty's figures if `measured`, which waits for all ranks; adds its gradient to
        that of the loss where it `acts`. Once per step, after backward and before `clip`."""
        self.model.wait_for_weights()
        parts = [domain.add_penalty(acts=acts, measured=measured) for domain in self.domains]
        found = [sums for sums in parts if sums is not None]
        if not found:
            return None
        sums = torch.stack(found).sum(0)
        return PenaltyFigures.of(all_reduce_(sums, None, self.model.traffic, "penalty figures"))

    @torch.no_grad()
    def clip(self, max_norm: float | None, clip_matrix_roles: bool = True) -> GradientNorm:
        """Scales the gradients in place to `max_norm` and returns their norm before.

        With `clip_matrix_roles` False, units of whole-matrix rules are left out of the norm that
        is compared and out of the scaling; `total` always covers every unit.
        """
        some = self.domains[0].buffers.gradients[0]
        dtype = torch.promote_types(some.dtype, torch.float32)
        squares = torch.zeros(2, dtype=dtype, device=some.device)
        gradients = list(self._gradients())
        for kind, counted, gradient in gradients:
            if counted:
                squares[kind] += torch.linalg.vector_norm(gradient, dtype=dtype).square()
        all_reduce_(squares, None, self.model.traffic, "gradient norm")
        total = squares.sum().sqrt()
        if max_norm is None:
            return GradientNorm(total, torch.ones_like(total))
        clipped = total if clip_matrix_roles else squares[0].sqrt()
        coefficient = (max_norm / (clipped + 1e-6)).clamp(max=1.0)
        for kind, _, gradient in gradients:
            if clip_matrix_roles or kind == 0:
                gradient.mul_(coefficient)
        return GradientNorm(total, coefficient)

    def _gradients(self) -> Iterator[tuple[int, bool, Tensor]]:
        """Every gradient that is stepped here: 1 if a whole-matrix rule steps it, whether this
        rank counts it in the norm, and the tensor."""
        for domain in self.domains:
            shards = domain.gradient_shards()
            for region in domain.regions:
                rule = region.assigned.rule
                yield int(rule.whole_matrix), region.counted, region.of(shards)
            for units in domain.materialized:
                for batch, gradients in units.gradients():
                    for gradient in gradients:
                        yield int(batch.rule.whole_matrix), True, gradient
                    if batch.gamma_rule is not None:
                        yield 0, True, batch.gamma_gradient

    @torch.no_grad()
    def step(self, factor: Tensor | float, active: Tensor) -> None:
        """None; one update of every unit.

        `factor` multiplies each group's peak learning rate. `active` is a 0-d bool tensor; where it
        is False nothing changes, bit for bit.
        """
        self.model.wait_for_weights()
        for domain in self.domains:
            domain.step(factor, active)
        self.model.refresh_in_graph(active)
        if not self.overlap_gather:
            self.model.wait_for_weights()

    @torch.no_grad()
    def guard_pc(self) -> tuple[Tensor, Tensor]:
        """Of every PC unit this rank is owner of, or has in its graph: the largest normalised
        singular value, which must be in [0, 1.1], and gamma, both `[units]`.

        A unit of which the tracked singular pair has lost the largest value gets a new pair. Costs
        some fifty passes over the weights and is meant for logging steps.
        """
        self.model.wait_for_weights()
        seen, gammas = self.model.guard_in_graph()
        for domain in self.domains:
            for batch in (b for units in domain.materialized for b in units.batches):
                seen.append(batch.guard_())
                gammas.append(batch.gamma[:, 0])
        none = torch.zeros(0, device=self.domains[0].buffers.master.device)
        return torch.cat([none, *seen]).float(), torch.cat([none, *gammas]).float()

    def reports(self) -> Iterator[tuple[Unit, Report]]:
        """Each matrix stepped here with its figures of the last step, 0-d tensors."""
        for batch in self.batches:
            for i, unit in enumerate(batch.units):
                yield unit, {key: value[i] for key, value in batch.report.items()}

    def msign_routes(self) -> dict[str, str]:
        """The way that msign's products go for each matrix stepped here by a rule that has it."""
        weight = self.domains[0].buffers.masters[0]
        return {
            unit.name: way
            for batch in self.batches
            if (way := batch.msign_route(weight.dtype, weight.device)) is not None
            for unit in batch.units
        }

    def memory_bytes(self) -> int:
        """Bytes of optimizer state and of masters that are copies, on this rank."""
        return sum(domain.memory_bytes() for domain in self.domains)
