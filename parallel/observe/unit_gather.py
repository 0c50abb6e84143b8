"""Brings matrices whole to one rank each, to be looked at: weights, gradients, updates.

A matrix that a layout cuts has no singular values of its own pieces that mean anything, so every
matrix of the model, whatever rule steps it, gets one rank that looks at it. What is brought is
anything that lies in this rank's shards. It travels as in a step, but in its own dtype, and a
bucket at a time, so that no rank holds more than its matrices of a bucket at once. Matrices of one
parameter have the same viewer, which so also has the activations that they share.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.units import Unit
from parallel.comm.collectives import Traffic
from parallel.optimizer.domain_optimizer import DomainOptimizer
from parallel.optimizer.exchange import Exchange, Journey, assemble, local_numel, plan_journeys
from parallel.optimizer.optimizer import DistributedOptimizer
from parallel.optimizer.placement import viewers
from parallel.optimizer.materialized_pc import PreconditionedBatch

Shards = list[list[Tensor]]
"""Per domain and bucket, this rank's shard of something that has the shape of the weights."""


@dataclass(frozen=True)
class Look:
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
            for batch in preconditioned(optimizer)
            for i, unit in enumerate(batch.units)
        },
    )


def preconditioned(optimizer: DistributedOptimizer) -> Iterator[PreconditionedBatch]:
    """The preconditioned matrices that this rank steps."""
    for domain in optimizer.domains:
        for units in domain.preconditioned:
            yield from units.batches


def gradients(optimizer: DistributedOptimizer, *, copy: bool) -> Shards:
    """The gradient shards now; before the step, those of a preconditioned unit are of PC(W)."""
    return [
        [shard.clone() if copy else shard for shard in domain.gradient_shards()]
        for domain in optimizer.domains
    ]


class Census:
    """The plan of who looks at what, for all domains of this rank's pipeline stage."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self.domains = [DomainCensus(domain) for domain in optimizer.domains]

    def looks(self, arrays: Mapping[str, Shards]) -> Iterator[Look]:
        """Every matrix that this rank is the viewer of, in stacks of equal shape; all ranks of the
        stage together. `arrays` are what is brought, by name."""
        for index, domain in enumerate(self.domains):
            mine = {name: shards[index] for name, shards in arrays.items()}
            yield from domain.looks(mine)

    def viewed(self, domain: int, parameter: str) -> bool:
        """Whether this rank looks at the matrices of a parameter."""
        return self.domains[domain].viewers[parameter] == self.domains[domain].rank


class DomainCensus:
    """The plan for one domain."""

    def __init__(self, domain: DomainOptimizer) -> None:
        self.buffers = domain.buffers
        self.rank = domain.domain.stage.rank
        self.viewers = viewers(domain.model.stage_units, domain.domain.stage.size)
        homes = {
            unit.name: self.viewers[unit.parameter]
            for units in domain.model.stage_units
            for unit in units
            if unit.is_matrix
        }
        layout = self.buffers.layout
        journeys = plan_journeys(domain.model.stage_units, layout, homes)
        by_bucket: dict[int, list[Journey]] = {}
        for journey in journeys:
            bucket, _ = layout.slots[journey.unit.parameter]
            by_bucket.setdefault(bucket.index, []).append(journey)
        self.plans = [
            (bucket, each, Exchange(each, domain.domain.stage, None))
            for bucket, each in by_bucket.items()
        ]

    def looks(self, arrays: Mapping[str, Sequence[Tensor]]) -> Iterator[Look]:
        """See `Census.looks`."""
        for bucket, journeys, exchange in self.plans:
            homed = [journey for journey in journeys if journey.home == self.rank]
            brought = {
                name: self._bring(homed, exchange, shards, shards[bucket])
                for name, shards in arrays.items()
            }
            alike: dict[tuple[int, ...], list[Journey]] = {}
            for journey in homed:
                alike.setdefault(journey.unit.shape, []).append(journey)
            for same in alike.values():
                matrices = {
                    name: torch.stack([assemble(j, whole[j.unit.name]) for j in same])
                    for name, whole in brought.items()
                }
                yield Look([journey.unit for journey in same], matrices)

    def _bring(
        self, homed: Sequence[Journey], exchange: Exchange, shards: Sequence[Tensor], like: Tensor
    ) -> dict[str, Tensor]:
        """The pieces `[pieces, local elements]` of every matrix of a bucket that is looked at
        here, in the dtype of `like`."""
        whole = {j.unit.name: like.new_empty(j.pieces, local_numel(j)) for j in homed}
        for journey in homed:
            if journey.stays:
                self.buffers.collect(journey.holdings[0].runs, shards, whole[journey.unit.name][0])
        exchange.bring(lambda run: self.buffers.owned(run, shards), whole, like, Traffic())
        return whole
