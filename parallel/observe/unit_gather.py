"""Gathers each whole weight, gradient and update matrix on one rank for inspection.

The singular values of a matrix cannot be computed from its shards' singular values. Therefore each
matrix is gathered on a single rank, its inspection rank. Any sharded tensor can be gathered.
Matrices are sent like in an optimizer step, except that they keep their dtype. They are sent in
several rounds, so that a round fits in each rank's memory. All matrices of a parameter share an
inspection rank, so that only this rank needs the parameter's input activations.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from models.units import Unit
from parallel.comm.collectives import CommVolume
from parallel.optimizer.distributed_optimizer import DistributedOptimizer
from parallel.optimizer.owned_stacks import StackMemory
from parallel.optimizer.unit_transfer import plan_transfers, stage_exchange
from parallel.storage.bucket_layout import BucketLayout
from spectral.batching import grouped
from spectral.sharded.placement import longest_processing_time


def inspection_rounds(
    units: Sequence[Sequence[Unit]], bucket_layout: BucketLayout, ranks: int, elements: int
) -> list[dict[str, int]]:
    """Split the matrices of a stage into rounds. A round maps unit names to inspection ranks.

    All matrices of a round are in one bucket. In a round, each rank inspects matrices with at most
    `elements` elements in total, or a single larger matrix. `units[i]` are the units of
    tensor-parallel rank i, and `ranks` is the number of ranks in the stage.
    """
    # Assign parameters in order of descending cost, each to the least loaded rank so far.
    costs: dict[str, int] = {}
    for members in units:
        for unit in {u.name: u for u in members if u.is_matrix}.values():
            short, long = sorted(unit.shape)
            costs[unit.parameter] = costs.get(unit.parameter, 0) + short * short * (long + short)
    names = sorted(costs)
    owners = longest_processing_time([costs[name] for name in names], [0.0] * ranks)
    places = dict(zip(names, owners, strict=True))
    whole = {unit.name: unit for members in units for unit in members if unit.is_matrix}
    buckets = grouped(whole.values(), lambda unit: bucket_layout.slots[unit.parameter][0].index)
    chunks: list[dict[str, int]] = []
    for members in buckets.values():
        rounds: list[dict[str, int]] = []
        # By rank: the index of its last round, and the number of elements in that round so far.
        last: dict[int, tuple[int, int]] = {}
        # Matrices of the same shape are inspected together if they fit in one round.
        for unit in sorted(members, key=lambda u: (u.shape, u.name)):
            rank = places[unit.parameter]
            number, before = last.get(rank, (0, 0))
            if before and before + unit.numel > elements:
                number, before = number + 1, 0
            last[rank] = number, before + unit.numel
            if number == len(rounds):
                rounds.append({})
            rounds[number][unit.name] = rank
        chunks += rounds
    return chunks


MOMENTUM: Final = "momentum"
"""Key of the momentum in the state of rules with momentum."""
Shards = list[list[Tensor]]
"""This rank's shards of weight-shaped tensors, by domain and bucket."""


@dataclass(frozen=True)
class Inspection:
    """Whole matrices of the same shape on their inspection rank.

    matrices   the gathered matrices `[units, rows, cols]` of each array, by the array's name
    """

    units: list[Unit]
    matrices: dict[str, Tensor]


@dataclass
class Snapshot:
    """Snapshot of the weights.

    shards   master shards; for PC layers, shards of PC(W)
    whole    W `[rows, cols]` of the PC layers owned by this rank, by unit name
    """

    shards: Shards
    whole: dict[str, Tensor] = field(default_factory=dict)


def weights(optimizer: DistributedOptimizer, *, copy: bool) -> Snapshot:
    """Return a snapshot of the current weights. With `copy`, the next step does not change the
    snapshot."""
    kept: Callable[[Tensor], Tensor] = torch.clone if copy else torch.Tensor.detach
    return Snapshot(
        [[kept(master) for master in domain.model.masters] for domain in optimizer.domains],
        {
            unit.name: kept(stack.weight[i])
            for stack in optimizer.materialized
            for i, unit in enumerate(stack.units)
        },
    )


def gradients(optimizer: DistributedOptimizer, *, copy: bool) -> Shards:
    """Return the current gradient shards or, with `copy`, copies of them.

    Before the optimizer step, the gradient of a PC layer is the gradient with respect to PC(W).
    """
    return [
        [shard.clone() if copy else shard for shard in domain.model.gradient_shards()]
        for domain in optimizer.domains
    ]


def momenta(optimizer: DistributedOptimizer) -> Snapshot:
    """Return a snapshot of the momenta (0 for rules without momentum). For PC layers, `whole` holds
    the momentum of W."""
    kept = Snapshot(
        [[torch.zeros_like(m) for m in domain.model.masters] for domain in optimizer.domains],
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
    """Gathers the whole matrices of all domains in this rank's pipeline stage."""

    def __init__(self, optimizer: DistributedOptimizer, elements: int) -> None:
        """Plan the gathers. At any time, each rank holds at most `elements` gathered elements of
        each array, or one larger matrix of each array."""
        self.plans = []
        for index, domain in enumerate(optimizer.domains):
            stage, units = domain.domain.stage, domain.model.stage_units
            layout = domain.model.bucket_layout
            for owners in inspection_rounds(units, layout, stage.size, elements):
                transfers = plan_transfers(units, layout, owners)
                bucket, _ = layout.slots[transfers[0].unit.parameter]
                owned = [transfer for transfer in transfers if transfer.owner == stage.rank]
                stacks = [*grouped(owned, lambda transfer: transfer.unit.shape).values()]
                exchange = stage_exchange(transfers, domain.domain, CommVolume())
                self.plans.append((index, bucket.index, stacks, exchange))

    def inspections(self, arrays: Mapping[str, Shards]) -> Iterator[Inspection]:
        """Gather every matrix and yield this rank's matrices, stacked by shape.

        `arrays` maps names to the shards to gather. Collective: all ranks of the stage must call
        this method. Requesting the next inspection frees the matrices of the previous one.
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
