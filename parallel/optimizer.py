"""The optimizer of a rank: gathers units into batches of equal shape and runs their rules.

Every data-parallel rank runs every unit of its model-parallel shard (the gradients are all-reduced
before). A matrix that tensor parallelism cuts is gathered whole on each of its ranks, so the
update is the one-process update, then every rank keeps its piece. The rules themselves are those
of `spectral.rules`, the same as in the one-process optimizer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from models.units import Unit, flat_shape
from parallel.groups import Axis, Groups
from parallel.model import ParallelModel
from parallel.routing import Assign, Assignment
from spectral.rules.base import Report, State


@dataclass
class UnitBatch:
    """Units of one shape and one assignment, stepped as one stack.

    exchange   the tensor-parallel axis over which the units are cut, None if they are whole here
    master     float32 copy `[batch, *local axes]` of the weights, None if the model is not 16-bit
    state      the rule's state of the (whole) units, first dimension = position in `units`
    """

    units: list[Unit]
    assigned: Assignment
    exchange: Axis | None
    master: Tensor | None
    state: State
    report: Report


@dataclass(frozen=True)
class GradientNorm:
    """total is the norm of the whole gradient, coefficient what the clipped part is multiplied by.
    Both are 0-d device tensors."""

    total: Tensor
    coefficient: Tensor


class ReplicatedOptimizer:
    """Steps all units this rank holds, each by the rule of its role."""

    def __init__(self, model: ParallelModel, assign: Assign, groups: Groups) -> None:
        """Raises ValueError if a whole-matrix rule is assigned to something that is no matrix."""
        self.model = model
        self.groups = groups
        self.batches = [
            self._new_batch(units, assign(units[0].role)) for units in group_units(model, assign)
        ]

    def clip(self, max_norm: float | None, whole_matrix_roles: bool = True) -> GradientNorm:
        """Scales the gradients in place to `max_norm` and returns their norm before.

        With `whole_matrix_roles` False, units of whole-matrix rules are left out of the norm that
        is compared and out of the scaling; `total` always covers every unit.
        """
        spectral, other = [], []
        for batch in self.batches:
            (spectral if batch.assigned.rule.whole_matrix else other).extend(batch.units)
        squares = torch.stack([self._square_sum(spectral), self._square_sum(other)])
        dist.all_reduce(squares, group=self.groups.model.group)
        total = squares.sum().sqrt()
        if max_norm is None:
            return GradientNorm(total, torch.ones_like(total))
        clipped = total if whole_matrix_roles else squares[1].sqrt()
        coefficient = (max_norm / (clipped + 1e-6)).clamp(max=1.0)
        units = spectral + other if whole_matrix_roles else other
        if units:
            torch._foreach_mul_([self.model.gradient(unit) for unit in units], coefficient)
        return GradientNorm(total, coefficient)

    @torch.no_grad()
    def step(self, factor: Tensor | float, active: Tensor) -> None:
        """None; one update of every unit.

        `factor` multiplies each group's peak learning rate. `active` is a 0-d bool tensor; where it
        is False nothing changes, bit for bit.
        """
        for batch in self.batches:
            local = self._stack(batch)
            weight = self._whole(batch, local)
            gradient = self._whole(batch, self._stack_gradients(batch))
            batch.report = batch.assigned.rule.step(
                weight,
                gradient,
                batch.state,
                lr=batch.assigned.lr * factor,
                weight_decay=batch.assigned.weight_decay,
                active=active,
            )
            self._store(batch, local, weight)

    def reports(self) -> Iterator[tuple[Unit, Report]]:
        """Each whole-matrix unit of this rank with its figures of the last step, 0-d tensors."""
        for batch in self.batches:
            for i, unit in enumerate(batch.units):
                if batch.report:
                    yield unit, {key: value[i] for key, value in batch.report.items()}

    def state(self) -> dict[str, State]:
        """The state of every unit by its name; tensors are views of the live state."""
        return {
            unit.name: {key: value[i] for key, value in batch.state.items()}
            for batch in self.batches
            for i, unit in enumerate(batch.units)
        }

    def memory_bytes(self) -> int:
        """Bytes of state and master weights on this rank."""
        tensors = [t for batch in self.batches for t in batch.state.values()]
        tensors += [batch.master for batch in self.batches if batch.master is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    def _new_batch(self, units: list[Unit], assigned: Assignment) -> UnitBatch:
        axis = self.groups.tensor
        cut = assigned.rule.whole_matrix and units[0].shard_axis is not None
        dtype = self.model.parameters[units[0].parameter].dtype
        batch = UnitBatch(units, assigned, axis if cut else None, None, {}, {})
        if dtype in (torch.bfloat16, torch.float16):
            batch.master = self._stack(batch).float()
        batch.state = assigned.rule.init_state(self._whole(batch, self._stack(batch)))
        return batch

    def _stack(self, batch: UnitBatch) -> Tensor:
        """This rank's pieces of the batch's weights, `[batch, *local axes]`."""
        if batch.master is not None:
            return batch.master
        parameters = self.model.parameters
        return torch.stack([u.view(parameters[u.parameter].detach()) for u in batch.units])

    def _stack_gradients(self, batch: UnitBatch) -> Tensor:
        gradients = torch.stack([self.model.gradient(unit) for unit in batch.units])
        return gradients if batch.master is not None else gradients.to(self._dtype(batch))

    def _dtype(self, batch: UnitBatch) -> torch.dtype:
        return self.model.parameters[batch.units[0].parameter].dtype

    def _whole(self, batch: UnitBatch, local: Tensor) -> Tensor:
        """Whole units `[batch, rows, cols]` of pieces `[batch, *local axes]`; pieces stay pieces
        where the rule is elementwise. May alias `local`."""
        unit = batch.units[0]
        if batch.exchange is not None:
            pieces = [torch.empty_like(local) for _ in range(batch.exchange.size)]
            dist.all_gather(pieces, local.contiguous(), group=batch.exchange.group)
            local = torch.cat(pieces, dim=1 + unit.shard_axis)
        return local.reshape(len(batch.units), *flat_shape(local.shape[1:]))

    def _store(self, batch: UnitBatch, local: Tensor, weight: Tensor) -> None:
        """None; writes updated whole units back into master weights and parameters."""
        axis, unit = batch.exchange, batch.units[0]
        if axis is not None:
            weight = unit.piece(weight, axis.rank, axis.size)
        weight = weight.reshape(local.shape)
        if batch.master is not None and weight.data_ptr() != batch.master.data_ptr():
            batch.master.copy_(weight)
        targets = [u.view(self.model.parameters[u.parameter].detach()) for u in batch.units]
        torch._foreach_copy_(targets, list(weight.unbind()))

    def _square_sum(self, units: Sequence[Unit]) -> Tensor:
        """Sum of squared gradient elements of `units`, each element counted on one rank only."""
        first = self.groups.tensor.rank == 0
        counted = [self.model.gradient(u) for u in units if first or not u.replicated]
        if not counted:
            return torch.zeros((), device=self.groups.device)
        return torch.stack(torch._foreach_norm(counted)).square().sum()


def group_units(model: ParallelModel, assign: Assign) -> list[list[Unit]]:
    """The model's units in lists that one rule can step as one stack, in forward order."""
    found: dict[tuple[object, ...], list[Unit]] = {}
    for unit in model.units:
        assigned = assign(unit.role)
        if assigned.rule.whole_matrix and not unit.is_matrix:
            raise ValueError(
                f"rule {assigned.rule_name} needs matrices, but role {unit.role} has {unit.name} "
                f"of shape {unit.shape}"
            )
        key = (assigned.rule_name, assigned.lr, assigned.weight_decay, unit.axes, unit.shard_axis)
        found.setdefault((assigned.group, *key), []).append(unit)
    return list(found.values())
