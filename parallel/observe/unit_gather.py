"""The unit gather: whole matrices on one rank each, for inspection: weights, gradients, updates.

The singular values of the pieces into which a layout cuts a matrix say nothing about the matrix, so
every matrix of the model, whatever rule steps it, has one rank that inspects it: its inspection
rank. Anything that lies in the ranks' shards can be gathered. It is sent as in a step, but in its
own dtype, and in rounds, so that no rank holds more matrices than it has room for.
Matrices of one parameter have the same inspection rank, which therefore also has the activations
that they share.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.units import Unit
from parallel.comm.collectives import CommVolume
from parallel.optimizer.domain_optimizer import DomainOptimizer
from parallel.optimizer.exchange import (
    UnitTransfer,
    assemble,
    assemble_stack,
    empty_pieces,
    plan_transfers,
    stage_exchange,
)
from parallel.optimizer.inspection import inspection_rounds
from parallel.optimizer.materialized_pc import MaterializedStack
from parallel.optimizer.optimizer import DistributedOptimizer
from spectral.grouped import grouped
from spectral.sharded.exchange import Exchange

Shards = list[list[Tensor]]
"""Per domain and bucket, this rank's shard of something that has the shape of the weights."""


@dataclass(frozen=True)
class Inspection:
    """Whole matrices of one shape on their inspection rank.

    matrices   `[units, rows, cols]` by the name of what was gathered
    """

    units: list[Unit]
    matrices: dict[str, Tensor]


@dataclass
class Snapshot:
    """The weights at one moment.

    shards   the masters; of a PC layer those of PC(W)
    whole    W `[rows, cols]` of the PC layers that this rank steps, by unit name
    """

    shards: Shards
    whole: dict[str, Tensor] = field(default_factory=dict)


def weights(optimizer: DistributedOptimizer, *, copy: bool) -> Snapshot:
    """Snapshot of the present weights; `copy` makes it outlive the next step."""
    kept: Callable[[Tensor], Tensor] = torch.clone if copy else torch.Tensor.detach
    return Snapshot(
        [[kept(master) for master in domain.buffers.masters] for domain in optimizer.domains],
        {
            unit.name: kept(stack.weight[i])
            for stack in materialized_stacks(optimizer)
            for i, unit in enumerate(stack.units)
        },
    )


def materialized_stacks(optimizer: DistributedOptimizer) -> Iterator[MaterializedStack]:
    """Stacks of the PC layers that this rank steps."""
    for domain in optimizer.domains:
        for units in domain.materialized:
            yield from units.stacks


def gradients(optimizer: DistributedOptimizer, *, copy: bool) -> Shards:
    """Present gradient shards; before the optimizer's step those of a PC layer are of PC(W)."""
    return [
        [shard.clone() if copy else shard for shard in domain.buffers.gradient_shards()]
        for domain in optimizer.domains
    ]


class UnitGather:
    """The unit gathers of all domains of this rank's pipeline stage."""

    def __init__(self, optimizer: DistributedOptimizer, elements: int) -> None:
        """Plan the gathers; a rank inspects matrices of `elements` elements, or one, at a time."""
        self.domains = [DomainUnitGather(domain, elements) for domain in optimizer.domains]

    def inspections(self, arrays: Mapping[str, Shards]) -> Iterator[Inspection]:
        """Gather every matrix and yield those that this rank inspects, in stacks of equal shape.

        `arrays` are the shards to gather, by name. All ranks of the stage call it together. The
        matrices of an inspection are dropped when the next one is asked for.
        """
        for index, domain in enumerate(self.domains):
            mine = {name: shards[index] for name, shards in arrays.items()}
            yield from domain.inspections(mine)


class DomainUnitGather:
    """The unit gather of one domain, planned once."""

    def __init__(self, domain: DomainOptimizer, elements: int) -> None:
        stage, units = domain.domain.stage, domain.model.stage_units
        self.rank = stage.rank
        bucket_layout = domain.buffers.bucket_layout
        self.plans = []
        for owners in inspection_rounds(units, bucket_layout, stage.size, elements):
            transfers = plan_transfers(units, bucket_layout, owners)
            bucket, _ = bucket_layout.slots[transfers[0].unit.parameter]
            exchange = stage_exchange(transfers, domain.domain, CommVolume())
            self.plans.append((bucket.index, transfers, exchange))

    def inspections(self, arrays: Mapping[str, Sequence[Tensor]]) -> Iterator[Inspection]:
        """Gather the matrices of this domain; see `UnitGather.inspections`."""
        for bucket, transfers, exchange in self.plans:
            owned = [transfer for transfer in transfers if transfer.owner == self.rank]
            gathered = {
                name: gathered_pieces(owned, exchange, shards, shards[bucket])
                for name, shards in arrays.items()
            }
            for stack in grouped(owned, lambda transfer: transfer.unit.shape).values():
                matrices = {name: joined(stack, whole) for name, whole in gathered.items()}
                yield Inspection([transfer.unit for transfer in stack], matrices)
                matrices.clear()
            del gathered


def gathered_pieces(
    owned: Sequence[UnitTransfer], exchange: Exchange, shards: Sequence[Tensor], like: Tensor
) -> dict[str, Tensor]:
    """Gather the pieces `[elements]` of the matrices inspected here, as `like`."""
    whole = empty_pieces(owned, like.dtype, like.device)
    exchange.gather(shards, whole, like)
    return whole


def joined(stack: Sequence[UnitTransfer], pieces: Mapping[str, Tensor]) -> Tensor:
    """Join the pieces of units of one shape to `[units, rows, cols]`, those of one unit without a
    copy if they lie together."""
    if len(stack) == 1:
        return assemble(stack[0], pieces[stack[0].unit.name])[None]
    return assemble_stack(stack, pieces)
