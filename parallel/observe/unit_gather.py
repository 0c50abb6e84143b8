"""Brings matrices whole to one rank each, to be looked at: weights, gradients, updates.

A matrix that a layout cuts has no singular values of its own pieces that mean anything, so every
matrix of the model, whatever rule steps it, gets one rank that looks at it. What is brought is
anything that lies in this rank's shards. It travels as in a step, but in its own dtype, and a
bucket at a time, so that no rank holds more than its matrices of a bucket at once. Matrices of one
parameter have the same inspection rank, which so also has the activations that they share.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.units import Unit
from parallel.comm.collectives import Traffic
from parallel.optimizer.domain_optimizer import DomainOptimizer
from parallel.optimizer.exchange import (
    Exchange,
    UnitTransfer,
    assemble,
    local_numel,
    plan_transfers,
)
from parallel.optimizer.materialized_pc import MaterializedStack
from parallel.optimizer.optimizer import DistributedOptimizer
from parallel.optimizer.placement import inspection_ranks

Shards = list[list[Tensor]]
"""Per domain and bucket, this rank's shard of something that has the shape of the weights."""


@dataclass(frozen=True)
class Inspection:
    """Matrices of one shape that this rank has whole: `matrices[name]` is `[units, rows, cols]`."""

    units: list[Unit]
    matrices: dict[str, Tensor]


@dataclass
class Snapshot:
    """What weights were at some moment.

    shards   the masters, for a preconditioned unit those of PC(W)
    whole    W of the preconditioned units that this rank steps, by name, `[rows, cols]`
    """

    shards: Shards
    whole: dict[str, Tensor] = field(default_factory=dict)


def weights(optimizer: DistributedOptimizer, *, copy: bool) -> Snapshot:
    """The weights now, with `copy` to be kept over a step."""
    kept: Callable[[Tensor], Tensor] = torch.clone if copy else torch.Tensor.detach
    return Snapshot(
        [[kept(master) for master in domain.buffers.masters] for domain in optimizer.domains],
        {
            unit.name: kept(batch.weight[i])
            for batch in materialized_stacks(optimizer)
            for i, unit in enumerate(batch.units)
        },
    )


def materialized_stacks(optimizer: DistributedOptimizer) -> Iterator[MaterializedStack]:
    """Yield the stacks of preconditioned matrices that this rank steps."""
    for domain in optimizer.domains:
        for units in domain.materialized:
            yield from units.batches


def gradients(optimizer: DistributedOptimizer, *, copy: bool) -> Shards:
    """The gradient shards now; before the step, those of a preconditioned unit are of PC(W)."""
    return [
        [shard.clone() if copy else shard for shard in domain.gradient_shards()]
        for domain in optimizer.domains
    ]


class UnitGather:
    """The plan of who looks at what, for all domains of this rank's pipeline stage."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self.domains = [DomainUnitGather(domain) for domain in optimizer.domains]

    def inspections(self, arrays: Mapping[str, Shards]) -> Iterator[Inspection]:
        """Every matrix that this rank is the inspection rank of, in stacks of equal shape; all
        ranks of the stage together. `arrays` are what is brought, by name."""
        for index, domain in enumerate(self.domains):
            mine = {name: shards[index] for name, shards in arrays.items()}
            yield from domain.inspections(mine)

    def inspected_here(self, domain: int, parameter: str) -> bool:
        """Whether this rank looks at the matrices of a parameter."""
        return self.domains[domain].inspection_ranks[parameter] == self.domains[domain].rank


class DomainUnitGather:
    """The plan for one domain."""

    def __init__(self, domain: DomainOptimizer) -> None:
        self.buffers = domain.buffers
        self.rank = domain.domain.stage.rank
        self.inspection_ranks = inspection_ranks(domain.model.stage_units, domain.domain.stage.size)
        owners = {
            unit.name: self.inspection_ranks[unit.parameter]
            for units in domain.model.stage_units
            for unit in units
            if unit.is_matrix
        }
        layout = self.buffers.layout
        transfers = plan_transfers(domain.model.stage_units, layout, owners)
        by_bucket: dict[int, list[UnitTransfer]] = {}
        for transfer in transfers:
            bucket, _ = layout.slots[transfer.unit.parameter]
            by_bucket.setdefault(bucket.index, []).append(transfer)
        self.plans = [
            (bucket, each, Exchange(each, domain.domain.stage, None))
            for bucket, each in by_bucket.items()
        ]

    def inspections(self, arrays: Mapping[str, Sequence[Tensor]]) -> Iterator[Inspection]:
        """See `UnitGather.looks`."""
        for bucket, transfers, exchange in self.plans:
            owned = [transfer for transfer in transfers if transfer.owner == self.rank]
            brought = {
                name: self._bring(owned, exchange, shards, shards[bucket])
                for name, shards in arrays.items()
            }
            alike: dict[tuple[int, ...], list[UnitTransfer]] = {}
            for transfer in owned:
                alike.setdefault(transfer.unit.shape, []).append(transfer)
            for same in alike.values():
                matrices = {
                    name: torch.stack([assemble(j, whole[j.unit.name]) for j in same])
                    for name, whole in brought.items()
                }
                yield Inspection([transfer.unit for transfer in same], matrices)

    def _bring(
        self,
        owned: Sequence[UnitTransfer],
        exchange: Exchange,
        shards: Sequence[Tensor],
        like: Tensor,
    ) -> dict[str, Tensor]:
        """The pieces `[pieces, local elements]` of every matrix of a bucket that is looked at
        here, in the dtype of `like`."""
        whole = {j.unit.name: like.new_empty(j.pieces, local_numel(j)) for j in owned}
        for transfer in owned:
            if transfer.is_local:
                self.buffers.collect(
                    transfer.shard_parts[0].spans, shards, whole[transfer.unit.name][0]
                )
        exchange.gather_to_owner(
            lambda span: self.buffers.shard_range(span, shards), whole, like, Traffic()
        )
        return whole
