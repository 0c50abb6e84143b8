"""One domain's share of the distributed optimizer: even shards of state, and the units owned here.

A step, for each group of buckets in forward order: elementwise rules and momentum span on this
rank's shards; matrices that are cut come to their owners; each owner steps its units in batches of
equal shape; updates go back; and the buckets' new weights start their way to all ranks, while the
next group is stepped. The rules are those of `spectral.rules`, the same as in one process.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from models.units import Unit
from parallel.comm.collectives import Traffic, all_gather_
from parallel.comm.groups import Domain
from parallel.comm.streams import Streams
from parallel.optimizer.exchange import (
    Exchange,
    UnitTransfer,
    WeightExchange,
    assemble,
    disassemble_,
    local_numel,
)
from parallel.optimizer.materialized_pc import MaterializedUnits
from parallel.optimizer.owned_stacks import OwnedStack, accumulated, owned_stacks
from parallel.optimizer.penalty_gradient import PenalisedUnits
from parallel.optimizer.routing import Assign, Assignment
from parallel.storage.buffers import Buffers
from parallel.storage.domain_model import DomainModel
from parallel.storage.grouping import forward_groups
from spectral.rules.base import State


@dataclass(frozen=True)
class Region:
    """A contiguous range of this rank's shard of a bucket whose elements one assignment updates.

    counted   whether this rank counts it in the gradient norm: replicated gains count once
    state     elementwise state of the rule, `[1, length]` each
    """

    bucket: int
    start: int  # within the shard
    length: int
    assigned: Assignment
    counted: bool
    state: State

    def of(self, shards: Sequence[Tensor]) -> Tensor:
        """`[1, length]`, the region's part of one tensor per bucket, a view."""
        return shards[self.bucket].narrow(0, self.start, self.length)[None]


@dataclass(frozen=True)
class StepGroup:
    """Buckets whose units are exchanged, stepped and gathered together."""

    buckets: tuple[int, ...]
    regions: list[Region]
    batches: list[OwnedStack]
    exchange: Exchange
    weights: WeightExchange
    materialized: MaterializedUnits
    penalised: PenalisedUnits

    @property
    def owned(self) -> list[UnitTransfer]:
        """Every unit of the group that this rank steps and whose parameter is its weight."""
        return [transfer for batch in self.batches for transfer in batch.transfers]

    @property
    def staying(self) -> list[UnitTransfer]:
        """Those that this rank owns whole."""
        return [transfer for transfer in self.owned if transfer.is_local]


class DomainOptimizer:
    """Steps the units of one domain: dense parameters, or experts."""

    def __init__(
        self,
        model: DomainModel,
        parameters: Mapping[str, Tensor],
        assign: Assign,
        transfers: Sequence[UnitTransfer],
        traffic: Traffic,
        *,
        step_groups: int = 4,
        wire: torch.dtype | None = None,
        momentum_dtype: torch.dtype | None = None,
    ) -> None:
        """`transfers` names the owner of every matrix of the domain's stage, the same on all its
        ranks. `step_groups` is how many groups of buckets a step is cut in, `wire` the dtype in
        which momentum and updates travel (None: that of the gradients and of the masters),
        `momentum_dtype` that in which matrix rules keep their momentum (None: the masters')."""
        self.model = model
        self.parameters = parameters
        self.domain: Domain = model.domain
        self.buffers: Buffers = model.buffers
        self.assign = assign
        self.traffic = traffic
        self.momentum_dtype = momentum_dtype
        self.streams = Streams(self.buffers.master.device)
        self.step_groups = [
            self._new_group(buckets, transfers, wire)
            for buckets in forward_groups(len(self.buffers.masters), step_groups)
        ]
        self.publish()
        if any(units.exists for units in self.materialized):
            self.model.spread()

    @property
    def batches(self) -> list[OwnedStack]:
        """Every batch this rank steps."""
        groups = self.step_groups
        return [b for group in groups for b in (*group.batches, *group.materialized.batches)]

    @property
    def materialized(self) -> list[MaterializedUnits]:
        """The units with materialized PC(W) of every group of buckets."""
        return [group.materialized for group in self.step_groups]

    @property
    def regions(self) -> list[Region]:
        """Every region of this rank's shards."""
        return [region for group in self.step_groups for region in group.regions]

    def gradient_shards(self) -> list[Tensor]:
        """This rank's shard of every gradient bucket, views."""
        return [self.buffers.shard(flat) for flat in self.buffers.gradients]

    def add_penalty(self, *, acts: bool, measured: bool) -> Tensor | None:
        """This rank's sums of `PenaltyFigures` if `measured`; adds the penalty's gradient to that
        of the loss where it `acts`, which must be before anything is made of the gradients."""
        each = [group.penalised.add_(acts=acts, measured=measured) for group in self.step_groups]
        found = [sums for sums in each if sums is not None]
        return torch.stack(found).sum(0) if found else None

    def step(self, factor: Tensor | float, active: Tensor) -> None:
        """None; one update of every unit, and the start of the new weights' all-gathers."""
        for group in self.step_groups:
            self._step_regions(group, factor, active)
            self._step_matrices(group, factor, active)
            group.materialized.step(factor, active)
            for bucket in group.buckets:
                self.buffers.write_parameters(bucket)
                self.model.gathers[bucket] = all_gather_(
                    self.buffers.parameters[bucket], self.domain.replicas, self.traffic
                )

    def publish(self) -> None:
        """Bring PC(W) of every preconditioned unit to the masters' shards."""
        for units in self.materialized:
            units.publish()

    def memory_bytes(self) -> int:
        """Bytes of optimizer state and of masters that are copies, on this rank."""
        tensors = [t for region in self.regions for t in region.state.values()]
        tensors += [t for batch in self.batches for t in batch.tensors()]
        masters = zip(self.buffers.masters, self.buffers.parameters, strict=True)
        tensors += [master for master, flat in masters if master.dtype != flat.dtype]
        return sum(t.numel() * t.element_size() for t in tensors)

    def _step_regions(self, group: StepGroup, factor: Tensor | float, active: Tensor) -> None:
        """Step elementwise units, and turns the gradients of matrices into momentum."""
        gradients, masters = self.gradient_shards(), self.buffers.masters
        for region in group.regions:
            rule, gradient = region.assigned.rule, region.of(gradients)
            if rule.whole_matrix:
                accumulate_(region, gradient, active)
                continue
            master = region.of(masters)
            rule.step(
                master,
                gradient.to(master.dtype),
                region.state,
                lr=region.assigned.lr * factor,
                weight_decay=region.assigned.weight_decay,
                active=active,
            )

    def _step_matrices(self, group: StepGroup, factor: Tensor | float, active: Tensor) -> None:
        """Step a group's matrices at their owners and adds the updates to the masters."""
        gradients, masters = self.gradient_shards(), self.buffers.masters
        momentum = self._room(group.owned, gradients[0].dtype)
        for transfer in group.staying:
            self._collect(transfer, gradients, momentum[transfer.unit.name])
        group.exchange.gather_to_owner(
            lambda span: self.buffers.shard_range(span, gradients),
            momentum,
            gradients[0],
            self.traffic,
        )
        changes = self._whole_weights(group.owned, group.weights)
        self.streams.run(
            [
                partial(self._update, batch, momentum, changes, factor, active)
                for batch in group.batches
            ]
        )
        for transfer in group.staying:
            self._add_spans(transfer, changes[transfer.unit.name], masters)
        group.exchange.scatter_from_owner(
            changes,
            lambda span: self.buffers.shard_range(span, masters),
            self.buffers.master,
            self.traffic,
        )

    def _whole_weights(
        self, owned: Sequence[UnitTransfer], arrival: WeightExchange
    ) -> dict[str, Tensor]:
        """The weights of each unit owned here, `[pieces, local elements]`.

        Masters where the owner owns all of it, else the model's parameters, which every
        data-parallel rank has.
        """
        weights = self._room(owned, self.buffers.master.dtype)
        arrival.gather_to_owner(
            self._local_weight, weights, self.buffers.parameters[0], self.traffic
        )
        for transfer in owned:
            if transfer.is_local:
                self._collect(transfer, self.buffers.masters, weights[transfer.unit.name])
            elif transfer.sources == (self.domain.tensor.rank,):
                weights[transfer.unit.name][0].copy_(self._local_weight(transfer.unit).flatten())
        return weights

    def _update(
        self,
        batch: OwnedStack,
        momentum: dict[str, Tensor],
        weights: dict[str, Tensor],
        factor: Tensor | float,
        active: Tensor,
    ) -> None:
        """None; spans the rule on a batch and leaves each unit's change in `weights`."""
        old = torch.stack([assemble(j, weights[j.unit.name]) for j in batch.transfers])
        new = old.clone()
        lr, weight_decay = batch.rates.at(factor)
        batch.report = batch.rule.update(
            new,
            torch.stack([assemble(j, momentum[j.unit.name]) for j in batch.transfers]).to(
                new.dtype
            ),
            batch.state,
            lr=lr,
            weight_decay=weight_decay,
            active=active,
        )
        for transfer, change in zip(batch.transfers, new.sub_(old), strict=True):
            disassemble_(transfer, change, weights[transfer.unit.name])

    def _room(self, owned: Sequence[UnitTransfer], dtype: torch.dtype) -> dict[str, Tensor]:
        """Room for each unit owned here, `[pieces, local elements]`."""
        return {
            transfer.unit.name: torch.empty(
                transfer.pieces,
                local_numel(transfer),
                dtype=dtype,
                device=self.buffers.master.device,
            )
            for transfer in owned
        }

    def _collect(self, transfer: UnitTransfer, shards: Sequence[Tensor], whole: Tensor) -> None:
        self.buffers.collect(transfer.shard_parts[0].spans, shards, whole[0])

    def _add_spans(self, transfer: UnitTransfer, whole: Tensor, shards: Sequence[Tensor]) -> None:
        for span in transfer.shard_parts[0].spans:
            self.buffers.shard_range(span, shards).add_(
                whole[0].narrow(0, span.piece_start, span.length)
            )

    def _local_weight(self, unit: Unit) -> Tensor:
        return unit.view(self.parameters[unit.parameter].detach())

    def _new_group(
        self, buckets: tuple[int, ...], transfers: Sequence[UnitTransfer], wire: torch.dtype | None
    ) -> StepGroup:
        """The plan of a group of buckets, and the state of what this rank steps of it."""
        present = [j for j in transfers if j.shard_parts[0].spans[0].bucket in buckets]
        stepped = [j for j in present if self.assign(j.unit).has_owner]
        mine = [j for j in stepped if self.assign(j.unit).pc is None]
        others = [j for j in stepped if self.assign(j.unit).pc is not None]
        penalised = [j for j in present if self.assign(j.unit).penalty is not None]
        device = self.buffers.master.device
        group = StepGroup(
            buckets,
            [region for bucket in buckets for region in self._new_regions(bucket)],
            owned_stacks(
                [j for j in mine if j.owner == self.domain.stage.rank], self.assign, device
            ),
            Exchange(mine, self.domain.stage, wire),
            WeightExchange(mine, self.domain.tensor, self.domain.replicas.rank),
            MaterializedUnits(others, self.domain, self.buffers, self.traffic, wire),
            PenalisedUnits(
                penalised, self.assign, self.domain, self.buffers, self.parameters, self.traffic
            ),
        )
        weights = self._whole_weights(group.owned, group.weights)
        for batch in group.batches:
            rule = batch.rule
            whole = torch.stack([assemble(j, weights[j.unit.name]) for j in batch.transfers])
            state = rule.init_state(whole)
            batch.state |= {k: v for k, v in state.items() if k not in rule.elementwise_state}
        units = group.materialized
        units.start(
            owned_stacks(units.owned, self.assign, device),
            self._whole_weights(units.owned, units.arrival),
            self.momentum_dtype,
        )
        return group

    def _new_regions(self, bucket: int) -> Iterator[Region]:
        """The regions of this rank's shard of a bucket, from the units' spans in it."""
        rank, shard = self.domain.replicas.rank, self.buffers.masters[bucket]
        first = rank * shard.numel()
        parts = [
            (span.start - first, span.length, self.assign(unit), unit.replicated)
            for unit in self.model.units
            for span in self.buffers.layout.shard_spans(unit, rank)
            if span.bucket == bucket and self.assign(unit).pc is None
        ]
        for start, length, assigned, replicated in joined(parts):
            weight = shard.narrow(0, start, length)[None]
            rule = assigned.rule
            if rule.whole_matrix:
                state = {
                    name: torch.zeros_like(weight, dtype=self.momentum_dtype)
                    for name in rule.elementwise_state
                }
            else:
                state = rule.init_state(weight)
            counted = not replicated or self.domain.tensor.rank == 0
            yield Region(bucket, start, length, assigned, counted, state)


def accumulate_(region: Region, gradient: Tensor, active: Tensor) -> None:
    """Turn the gradient of a region of matrices into momentum, in place."""
    result = accumulated(region.assigned.rule, gradient, region.state, active)
    if gradient.dtype != result.dtype:
        gradient.copy_(result)


Part = tuple[int, int, Assignment, bool]
"""(start, length, assignment, replicated) of a contiguous range of a shard."""


def joined(parts: Sequence[Part]) -> list[Part]:
    """`parts` in order, neighbours that touch and are treated alike made one."""
    found: list[Part] = []
    for start, length, assigned, replicated in sorted(parts, key=lambda part: part[0]):
        kind = assigned, replicated
        if found and found[-1][0] + found[-1][1] == start and found[-1][2:] == kind:
            start, length = found[-1][0], found.pop()[1] + length
        found.append((start, length, *kind))
    return found
