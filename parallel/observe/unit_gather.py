"""The unit gather: whole matrices on one rank each, for inspection: weights, gradients, updates.

The singular values of the pieces into which a layout cuts a matrix say nothing about the matrix, so
every matrix of the model, whatever rule steps it, has one rank that inspects it: its inspection
rank. Anything that lies in the ranks' shards can be gathered. It is sent as in a step, but in its
own dtype, and in rounds, so that no rank holds more matrices than it has room for.
Matrices of one parameter have the same inspection rank, which therefore also has the activations
that they share.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from models.units import Unit
from parallel.comm.collectives import CommVolume
from parallel.optimizer.exchange import StackMemory, plan_transfers, stage_exchange
from parallel.optimizer.inspection import inspection_rounds
from parallel.optimizer.optimizer import DistributedOptimizer
from spectral.batching import grouped

MOMENTUM: Final = "momentum"
"""Name of the momentum in the state of every rule that keeps one."""
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
            for stack in optimizer.materialized
            for i, unit in enumerate(stack.units)
        },
    )


def gradients(optimizer: DistributedOptimizer, *, copy: bool) -> Shards:
    """Present gradient shards; before the optimizer's step those of a PC layer are of PC(W)."""
    return [
        [shard.clone() if copy else shard for shard in domain.buffers.gradient_shards()]
        for domain in optimizer.domains
    ]


def momenta(optimizer: DistributedOptimizer) -> Snapshot:
    """Snapshot of the present momenta, 0 where a rule keeps none; of a PC layer those of W."""
    kept = Snapshot(
        [[torch.zeros_like(m) for m in domain.buffers.masters] for domain in optimizer.domains],
        {
            unit.name: stack.state[MOMENTUM][i]
            for stack in optimizer.materialized
            if MOMENTUM in stack.state
            for i, unit in enumerate(stack.units)
        },
    )
    for domain, shards in zip(optimizer.domains, kept.shards, strict=True):
        for region in domain.regions:
            if MOMENTUM in region.state:
                region.of(shards).copy_(region.state[MOMENTUM])
    return kept


class UnitGather:
    """The unit gathers of all domains of this rank's pipeline stage, planned once."""

    def __init__(self, optimizer: DistributedOptimizer, elements: int) -> None:
        """Plan the gathers; a rank inspects matrices of `elements` elements, or one, at a time."""
        self.plans = []
        for index, domain in enumerate(optimizer.domains):
            stage, units = domain.domain.stage, domain.model.stage_units
            layout = domain.buffers.bucket_layout
            for owners in inspection_rounds(units, layout, stage.size, elements):
                transfers = plan_transfers(units, layout, owners)
                bucket, _ = layout.slots[transfers[0].unit.parameter]
                owned = [transfer for transfer in transfers if transfer.owner == stage.rank]
                stacks = [*grouped(owned, lambda transfer: transfer.unit.shape).values()]
                exchange = stage_exchange(transfers, domain.domain, CommVolume())
                self.plans.append((index, bucket.index, stacks, exchange))

    def inspections(self, arrays: Mapping[str, Shards]) -> Iterator[Inspection]:
        """Gather every matrix and yield those that this rank inspects, in stacks of equal shape.

        `arrays` are the shards to gather, by name. All ranks of the stage call it together. The
        matrices of an inspection are dropped when the next one is asked for.
        """
        for index, bucket, stacks, exchange in self.plans:
            gathered = {}
            for name, shards in arrays.items():
                held, like = shards[index], shards[index][bucket]
                gathered[name] = StackMemory(stacks, like.dtype, like.device)
                exchange.gather(held, gathered[name].pieces, like)
            for stack in stacks:
                matrices = {name: memory.assembled(stack) for name, memory in gathered.items()}
                yield Inspection([transfer.unit for transfer in stack], matrices)
                matrices.clear()
            del gathered
