"""The gradient of the Gram penalty, added to the loss gradient once per step.

The penalty's gradient only depends on the weight. The unit's owner computes this gradient from the
parameter, of which every data-parallel rank stores a copy. For PC layers, the parameter is the
effective weight. Like an update, the gradient is sent to the ranks whose shards hold the unit's
gradient. The gradient norm, clipping and the step then use the sum of both gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from parallel.comm.collectives import all_to_all
from parallel.optimizer.owned_stacks import StackMemory, cut_all_
from parallel.optimizer.routing import Assign
from parallel.optimizer.unit_transfer import UnitTransfer, stage_exchange
from parallel.storage.domain_model import DomainModel
from spectral.batching import grouped
from spectral.division import span_of
from spectral.gram_penalty import gram_penalty_and_grad
from spectral.sharded.exchange import Exchange, Part, Transfer

SUMS = 5


@dataclass(frozen=True)
class PenaltyFigures:
    """The penalty over all units in one step.

    value                coefficient times the sum of the penalties, in nats per token like the loss
    share                mean over units of ||OffDiag||_F^2 / ||W||_F^4, which is independent of
                         the scale of W
    gradient_norm        norm of the gradient of `value`
    loss_gradient_norm   norm of the loss gradient with respect to the penalised units
    """

    value: float
    share: float
    gradient_norm: float
    loss_gradient_norm: float


class PenalisedUnits:
    """The penalised units of one step group, on one rank."""

    def __init__(
        self, transfers: Sequence[UnitTransfer], assign: Assign, model: DomainModel
    ) -> None:
        domain, comm_volume = model.domain, model.comm_volume
        self.exists = bool(transfers)  # the same on all ranks of the stage
        self.model = model
        penalised = [unit for unit in model.units if assign(unit).penalty is not None]
        self.weights = {unit.name: model.weight(unit) for unit in penalised}
        self.exchange = stage_exchange(transfers, domain, comm_volume, "penalty")
        # Every data-parallel rank holds all parameters of its tensor-parallel rank, so an owner
        # only receives weights from other ranks in its tensor-parallel group.
        tensor = domain.tensor
        near = []
        for t in transfers:
            if t.owner // tensor.size == domain.replicas.rank:
                size = t.unit.numel // t.pieces
                pieces = tuple(
                    Part(rank, t.matrix, (), (span_of(i * size, size),))
                    for i, rank in enumerate(t.tensor_ranks)
                )
                near.append(Transfer(t.matrix, t.owner % tensor.size, pieces, ()))
        send = partial(all_to_all, axis=tensor, comm_volume=comm_volume, kind="penalty weights")
        self.weight_exchange = Exchange(near, (), tensor.rank, tensor.size, send, send)
        owned = [t for t in transfers if t.owner == domain.stage.rank]
        self.parts = [
            part
            for transfer in transfers
            for part in transfer.sources
            if part.rank == domain.stage.rank
        ]
        self.stacks = grouped(owned, lambda t: (assign(t.unit).penalty, t.unit.shape))

    def add_(self, *, enabled: bool, measured: bool) -> Tensor | None:
        """Add the penalty's gradient to the gradient shards if `enabled`.

        Collective: all ranks of the stage must call this method. If `measured`, returns this rank's
        sums `[SUMS]` for `PenaltyFigures`: the penalty, the shares, the number of units, and the
        squared norms of the penalty gradient and of the loss gradient. Otherwise returns None.
        """
        shards, some = self.model.gradient_shards(), self.model.parameters[0]
        sums = torch.zeros(SUMS, dtype=torch.float64, device=some.device) if measured else None
        if not self.exists:
            return sums
        if sums is not None:
            for part in self.parts:
                sums[4] += part.of(shards).double().square().sum()
        stacks = self.stacks.values()
        weights = StackMemory(stacks, some.dtype, some.device)
        self.weight_exchange.gather(self.weights, weights.pieces, some)
        gradients = StackMemory(stacks, shards[0].dtype, shards[0].device)
        for (penalty, _), stack in self.stacks.items():
            assert penalty is not None
            matrices = weights.assembled(stack)
            matrices = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
            value, gradient = gram_penalty_and_grad(
                matrices, power=penalty.power, side=penalty.side, normalize=penalty.normalize
            )
            gradient.mul_(penalty.coefficient)
            cut_all_(stack, gradient, gradients.pieces)
            if sums is not None:
                share, _ = gram_penalty_and_grad(matrices, side=penalty.side, normalize="frobenius")
                sums[0] += penalty.coefficient * value.double().sum()
                sums[1] += share.double().sum()
                sums[2] += len(stack)
                sums[3] += gradient.double().square().sum()
        if enabled:
            self.exchange.scatter(gradients.pieces, shards, shards[0], add=True)
        return sums
