"""The Gram penalty's gradient, added once per step to that of the loss.

It depends on the weight alone, so it is computed by one rank, the unit's owner, from the parameter
that every data-parallel rank has, which of a PC layer is the effective weight. It goes to the ranks
that own the unit's gradient, as the owner's updates do, and everything that follows, from the norm
on, takes it for part of the gradient of the loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from parallel.comm.collectives import Traffic
from parallel.comm.groups import Domain
from parallel.optimizer.exchange import (
    Exchange,
    UnitTransfer,
    WeightExchange,
    assemble,
    disassemble_,
    local_numel,
)
from parallel.optimizer.routing import Assign, Penalty
from parallel.storage.buffers import Buffers
from spectral.gram_penalty import gram_penalty_and_grad

SUMS = 5


@dataclass(frozen=True)
class PenaltyFigures:
    """The penalty over all units, as it is now.

    value              coefficient times the sum of the penalties, nats per token as the loss
    share              mean over units of ||OffDiag||_F^2 / ||W||_F^4, which no scale of W changes
    gradient_norm      of `value`
    loss_gradient_norm of the loss alone, over the penalised units
    """

    value: float
    share: float
    gradient_norm: float
    loss_gradient_norm: float

    @classmethod
    def of(cls, sums: Tensor) -> Self:
        """The figures of the sums `[SUMS]` over all ranks; waits for the device."""
        value, shares, units, squares, loss_squares = sums.tolist()
        return cls(value, shares / max(1.0, units), squares**0.5, loss_squares**0.5)


@dataclass(frozen=True)
class PenalisedStack:
    """Units of one shape and penalty that this rank penalises as one stack."""

    transfers: list[UnitTransfer]
    penalty: Penalty


class PenalisedUnits:
    """The penalised units of one group of buckets, on one rank."""

    def __init__(
        self,
        transfers: Sequence[UnitTransfer],
        assign: Assign,
        domain: Domain,
        buffers: Buffers,
        parameters: Mapping[str, Tensor],
        traffic: Traffic,
    ) -> None:
        self.exists = bool(transfers)  # on every rank of the stage or on none
        self.domain = domain
        self.buffers = buffers
        self.parameters = parameters
        self.traffic = traffic
        self.exchange = Exchange(transfers, domain.stage, None, kind="penalty")
        self.arrival = WeightExchange(
            transfers, domain.tensor, domain.replicas.rank, kind="penalty weights"
        )
        self.owned = [j for j in transfers if j.owner == domain.stage.rank]
        self.spans = [
            span
            for transfer in transfers
            for held in transfer.shard_parts
            if held.rank == domain.stage.rank
            for span in held.spans
        ]
        self.batches = penalised_stacks(self.owned, assign)

    def add_(self, *, acts: bool, measured: bool) -> Tensor | None:
        """This rank's `[SUMS]` of `PenaltyFigures` if `measured`, else None; where the penalty
        `acts`, adds its gradient to the gradient shards. All ranks of the stage together."""
        if not self.exists:
            return self._zeros() if measured else None
        shards = [self.buffers.shard(flat) for flat in self.buffers.gradients]
        sums = self._zeros()
        if measured:
            for span in self.spans:
                sums[4] += self.buffers.shard_range(span, shards).double().square().sum()
        weights = self._weights()
        gradients = self._room(shards[0].dtype)
        for batch in self.batches:
            sums[:4] += self._penalise(batch, weights, gradients, measured=measured)
        if acts:
            self._add(gradients, shards)
        return sums if measured else None

    def _penalise(
        self,
        batch: PenalisedStack,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        *,
        measured: bool,
    ) -> Tensor:
        """The batch's value, shares, number of units and squared gradient, `[SUMS - 1]`; leaves
        each unit's gradient in `gradients`."""
        penalty = batch.penalty
        stack = torch.stack([assemble(j, weights[j.unit.name]) for j in batch.transfers])
        stack = stack.to(torch.promote_types(stack.dtype, torch.float32))
        value, gradient = gram_penalty_and_grad(
            stack, power=penalty.power, side=penalty.side, normalize=penalty.normalize
        )
        gradient.mul_(penalty.coefficient)
        for transfer, each in zip(batch.transfers, gradient, strict=True):
            disassemble_(transfer, each, gradients[transfer.unit.name])
        found = self._zeros()[:4]
        if measured:
            share, _ = gram_penalty_and_grad(stack, side=penalty.side, normalize="frobenius")
            found[0] = penalty.coefficient * value.double().sum()
            found[1] = share.double().sum()
            found[2] = len(batch.transfers)
            found[3] = gradient.double().square().sum()
        return found

    def _weights(self) -> dict[str, Tensor]:
        """What the model multiplies by, of each unit owned here, `[pieces, local elements]`."""
        some = self.buffers.parameters[0]
        weights = self._room(some.dtype)
        self.arrival.gather_to_owner(
            lambda unit: unit.view(self.parameters[unit.parameter].detach()),
            weights,
            some,
            self.traffic,
        )
        for transfer in self.owned:
            if transfer.sources == (self.domain.tensor.rank,):
                local = transfer.unit.view(self.parameters[transfer.unit.parameter].detach())
                weights[transfer.unit.name][0].copy_(local.flatten())
        return weights

    def _add(self, gradients: Mapping[str, Tensor], shards: Sequence[Tensor]) -> None:
        """Add the penalty's gradients to the shards of their owners."""
        for transfer in self.owned:
            if transfer.is_local:
                whole = gradients[transfer.unit.name][0]
                for span in transfer.shard_parts[0].spans:
                    part = whole.narrow(0, span.piece_start, span.length)
                    self.buffers.shard_range(span, shards).add_(part)
        self.exchange.scatter_from_owner(
            gradients, lambda span: self.buffers.shard_range(span, shards), shards[0], self.traffic
        )

    def _room(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Room for each unit owned here, `[pieces, local elements]`."""
        device = self.buffers.masters[0].device
        return {
            j.unit.name: torch.empty(j.pieces, local_numel(j), dtype=dtype, device=device)
            for j in self.owned
        }

    def _zeros(self) -> Tensor:
        return torch.zeros(SUMS, dtype=torch.float64, device=self.buffers.masters[0].device)


def penalised_stacks(transfers: Sequence[UnitTransfer], assign: Assign) -> list[PenalisedStack]:
    """Group the transfers of penalised units into stacks."""
    found: dict[tuple[Penalty, tuple[int, ...]], list[UnitTransfer]] = {}
    for transfer in transfers:
        penalty = assign(transfer.unit).penalty
        assert penalty is not None
        found.setdefault((penalty, transfer.unit.shape), []).append(transfer)
    return [PenalisedStack(mine, penalty) for (penalty, _), mine in found.items()]
