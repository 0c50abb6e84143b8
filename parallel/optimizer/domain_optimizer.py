"""The distributed optimizer for one domain. State is sharded evenly, and matrices are assigned to
owners.

A step processes the step groups in forward order. For each group, `step_regions` first applies
elementwise rules to this rank's shards and replaces matrix gradients with momentum. Then
`step_matrices` sends sharded matrices to their owners. Each owner updates its units in stacks of
the same shape and sends the updates back. The all-gather of the group's new weights overlaps with
the next step group. The rules in `spectral.rules` are used unchanged.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain

import torch
from torch import Tensor

from models.units import Unit
from parallel.comm.groups import Domain
from parallel.optimizer.materialized_pc import MaterializedUnits
from parallel.optimizer.owned_stacks import (
    OwnedStack,
    StackMemory,
    StepOptions,
    SteppedStack,
    Streams,
    gathered_weights,
    owned_stacks,
)
from parallel.optimizer.penalty_gradient import PenalisedUnits
from parallel.optimizer.routing import Assign, Assignment
from parallel.optimizer.unit_transfer import UnitTransfer, stage_exchange
from parallel.storage.domain_model import DomainModel
from spectral.batching import add_all_, copy_all_, grouped
from spectral.rules.base import Rate, Report, Rule, Stack, State, Step
from spectral.sharded.exchange import Exchange, local_pairs
from spectral.singular_triplets import cold_start
from spectral.sphere import hard_factor
from spectral.stepping import accumulate_, elements_of, step_units


@dataclass(frozen=True)
class Region:
    """A contiguous range of this rank's shard of a bucket, with a single assignment.

    start     offset in the shard
    in_norm   whether this rank counts the region in the gradient norm; exactly one rank counts each
              element
    state     the rule's elementwise state, tensors `[1, length]`
    report    metrics from an elementwise rule's last step, tensors `[1]`
    """

    bucket: int
    start: int
    length: int
    assigned: Assignment
    in_norm: bool
    state: State
    report: Report = field(default_factory=dict)

    def of(self, shards: Sequence[Tensor]) -> Tensor:
        """Return a view `[1, length]` of the region. `shards` contains one tensor per bucket."""
        return shards[self.bucket].narrow(0, self.start, self.length)[None]


@dataclass(frozen=True, kw_only=True)
class StepGroup:
    """Buckets whose units are exchanged, updated and all-gathered together.

    regions   regions of this rank's shards, without PC layers
    stacks    stacks owned by this rank, without PC layers
    kept      weights `[elements]`, by unit name, of owned units that are not fully contained in
              this rank's shard; these weights remain equal to the master weights on other ranks,
              because all ranks add the same updates
    """

    buckets: tuple[int, ...]
    regions: list[Region]
    stacks: list[OwnedStack]
    exchange: Exchange
    materialized: MaterializedUnits
    penalised: PenalisedUnits
    kept: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def matrix_regions(self) -> dict[Rule, list[Region]]:
        """The regions with a whole-matrix rule, by rule."""
        regions = [region for region in self.regions if region.assigned.rule.whole_matrix]
        return grouped(regions, lambda region: region.assigned.rule)

    @cached_property
    def elementwise_regions(self) -> dict[tuple[Rule, float, float], list[Region]]:
        """The other regions, by rule, learning rate and weight decay."""
        regions = [region for region in self.regions if not region.assigned.rule.whole_matrix]
        return grouped(regions, lambda r: (r.assigned.rule, r.assigned.lr, r.assigned.weight_decay))

    @cached_property
    def stacks_by_rule(self) -> dict[Rule, list[OwnedStack]]:
        """The stacks, by rule."""
        return grouped(self.stacks, lambda stack: stack.rule)


class DomainOptimizer:
    """Optimizer for the units of one domain: dense parameters or experts."""

    def __init__(
        self,
        model: DomainModel,
        assign: Assign,
        transfers: Sequence[UnitTransfer],
        options: StepOptions,
    ) -> None:
        """Plan the step groups and allocate the state.

        Args:
            model: the domain's parameters.
            assign: function that returns a unit's rule, rates and penalty.
            transfers: owner and parts of every owned unit, the same on all ranks of the stage.
            options: number of step groups, and dtypes.
        """
        self.model = model
        self.domain: Domain = model.domain
        self.assign = assign
        self.options = options
        self.streams = Streams(self.model.master.device)
        self.step_groups = [
            self._new_group(buckets, transfers)
            for buckets in self.model.bucket_layout.step_groups(options.step_groups)
        ]
        self.publish()
        if any(units.exists for units in self.materialized):
            self.model.all_gather_weights()

    @property
    def stacks(self) -> list[OwnedStack]:
        """All stacks owned by this rank, including PC layers."""
        groups = self.step_groups
        return [b for group in groups for b in (*group.stacks, *group.materialized.stacks)]

    @property
    def materialized(self) -> list[MaterializedUnits]:
        """PC layers, by step group."""
        return [group.materialized for group in self.step_groups]

    @property
    def regions(self) -> list[Region]:
        """All regions of this rank's shards."""
        return [region for group in self.step_groups for region in group.regions]

    def publish(self) -> None:
        """Write PC(W) of every PC layer to the master shards."""
        for units in self.materialized:
            units.publish()

    def reload_kept(self) -> None:
        """Reload the owners' copies of weights from the master weights, e.g. after loading a
        checkpoint."""
        for group in self.step_groups:
            group.exchange.gather(self.model.masters, group.kept, self.model.master)

    def rescalings(self) -> Iterator[tuple[Unit, str, float]]:
        """Yield (unit, rule name, factor) for each owned matrix that is rescaled to a radius by its
        rule. Materialized PC layers are omitted. `factor` is radius / spectral norm."""
        master = self.model.master
        for group in self.step_groups:
            for stack in group.stacks:
                radius = stack.rule.radius_of(stack.units[0].shape)
                if radius is None or not stack.rule.rescales:
                    continue
                weights = StackMemory([stack.transfers], master.dtype, master.device)
                copy_all_(chain(*self._weight_parts(group, weights.pieces)))
                sigma, _, _ = cold_start(weights.assembled(stack.transfers))
                for unit, factor in zip(stack.units, hard_factor(sigma, radius), strict=True):
                    yield unit, stack.assigned.rule_name, factor.item()

    def memory_bytes(self) -> int:
        """Return the number of bytes of optimizer state, separate master weights and owned units'
        weights on this rank."""
        tensors = [t for region in self.regions for t in region.state.values()]
        tensors += [t for stack in self.stacks for t in stack.tensors()]
        tensors += [weight for group in self.step_groups for weight in group.kept.values()]
        masters = zip(self.model.masters, self.model.parameters, strict=True)
        tensors += [master for master, flat in masters if master.dtype != flat.dtype]
        return sum(t.numel() * t.element_size() for t in tensors)

    def step_regions(
        self, group: StepGroup, rate: Callable[[float], Rate], active: Tensor
    ) -> list[Tensor]:
        """Update elementwise units, and replace matrix gradients with momentum.

        Returns the gradient bucket shards, which now contain momentum.
        """
        shards, masters = self.model.gradient_shards(), self.model.masters
        wide = torch.promote_types(shards[0].dtype, torch.float32)
        for rule, regions in group.matrix_regions.items():
            gradients = [region.of(shards) for region in regions]
            accumulate_(rule, gradients, [region.state for region in regions], active, wide)
        for (rule, lr, weight_decay), regions in group.elementwise_regions.items():
            step = Step(rate(lr), weight_decay, active)
            stacks = [
                Stack(
                    region.of(masters),
                    region.of(shards).to(masters[region.bucket].dtype),
                    region.state,
                    step,
                )
                for region in regions
            ]
            accumulate_(rule, [s.grad for s in stacks], [s.state for s in stacks], active)
            for region, report in zip(regions, rule.update(stacks), strict=True):
                region.report.clear()
                region.report.update(report)
        return shards

    def step_matrices(
        self,
        group: StepGroup,
        momenta: Sequence[Tensor],
        rate: Callable[[float], Rate],
        active: Tensor,
    ) -> None:
        """Update the matrices owned by this rank, and add the updates of all owners to the masters.

        `momenta` is the result of `step_regions`.
        """
        exchange, wire = group.exchange, self.options.exchange_dtype
        master, masters = self.model.master, self.model.masters
        stacks = [stack.transfers for stack in group.stacks]
        momentum = StackMemory(stacks, momenta[0].dtype, momenta[0].device)
        exchange.gather(momenta, momentum.pieces, momenta[0], wire)
        weights = StackMemory(stacks, master.dtype, master.device)
        kept, local = self._weight_parts(group, weights.pieces)
        copy_all_([*kept, *local])
        for rule, owned in group.stacks_by_rule.items():
            units = [
                SteppedStack(stack, momentum, weights, stack.assigned.step(rate, active))
                for stack in owned
            ]
            spread = partial(self.streams.spread, elements=partial(elements_of, units))
            for stack, report in zip(owned, step_units(rule, units, spread=spread), strict=True):
                stack.report = report
        copy_all_((master_piece, new) for new, master_piece in local)
        updates_of_(kept, wire)
        exchange.scatter(weights.pieces, masters, master, wire, add=True, local=False)

    def _weight_parts(
        self, group: StepGroup, pieces: Mapping[str, Tensor]
    ) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
        """Pair `pieces` of owned units, by unit name, with the weights on this rank.

        Returns pairs with this rank's copies of units (`StepGroup.kept`), and pairs of views with
        the master shards. Both together hold the whole unit.
        """
        kept = [(pieces[name], weight) for name, weight in group.kept.items() if name in pieces]
        parts = [part for part in group.exchange.outward.local if part[0] in pieces]
        return kept, [*local_pairs(parts, pieces, self.model.masters)]

    def _new_group(self, buckets: tuple[int, ...], transfers: Sequence[UnitTransfer]) -> StepGroup:
        """Plan a step group and allocate state for the units owned by this rank."""
        rank = self.domain.stage.rank
        pairs = [(t, self.assign(t.unit)) for t in transfers if t.sources[0].tensor in buckets]
        plain = [t for t, assigned in pairs if assigned.pc is None and assigned.rule.whole_matrix]
        pc = [t for t, assigned in pairs if assigned.pc is not None]
        penalised = [t for t, assigned in pairs if assigned.penalty is not None]
        stacks = owned_stacks([t for t in plain if t.owner == rank], self.assign)
        group = StepGroup(
            buckets=buckets,
            regions=[region for bucket in buckets for region in self._new_regions(bucket)],
            stacks=stacks,
            exchange=stage_exchange(plain, self.domain, self.model.comm_volume),
            materialized=MaterializedUnits(pc, self.assign, self.model, self.options),
            penalised=PenalisedUnits(penalised, self.assign, self.model),
        )
        weights = gathered_weights(stacks, group.exchange, self.model)
        for stack in stacks:
            rule = stack.rule
            moved = (t.unit.name for t in stack.transfers if not t.is_local)
            group.kept.update((name, weights.pieces[name].clone()) for name in moved)
            state = rule.init_state(weights.assembled(stack.transfers))
            stack.state |= {k: v for k, v in state.items() if k not in rule.elementwise_state}
        return group

    def _new_regions(self, bucket: int) -> Iterator[Region]:
        """Yield the regions of this rank's shard of a bucket."""
        rank, shard = self.domain.replicas.rank, self.model.masters[bucket]
        tensor_rank = self.domain.tensor.rank
        first = rank * shard.numel()
        bucket_layout = self.model.bucket_layout
        spans = [
            (span.start - first, span.length, self.assign(unit), unit.counts_on(tensor_rank))
            for unit in self.model.units
            if bucket_layout.slots[unit.parameter][0].index == bucket
            if self.assign(unit).pc is None
            for span in bucket_layout.shard_spans(unit, rank)
        ]
        for start, length, assigned, in_norm in joined(spans):
            weight = shard.narrow(0, start, length)[None]
            rule = assigned.rule
            if rule.whole_matrix:
                state = {
                    name: torch.zeros_like(weight, dtype=self.options.momentum_dtype)
                    for name in rule.elementwise_state
                }
            else:
                state = rule.init_state(weight)
            yield Region(bucket, start, length, assigned, in_norm, state)


def updates_of_(pairs: Sequence[tuple[Tensor, Tensor]], wire: torch.dtype | None) -> None:
    """Overwrite each new weight with its update, and add the update to the owner's copy of the
    weight.

    `pairs` contains (new weight, owner's copy of the old weight) for each unit. Rules update
    weights in place, so an update is the new weight minus the old one. If `wire` is given, updates
    are rounded to this dtype before they are added and sent.
    """
    if not pairs:
        return
    updates, kept = map(list, zip(*pairs, strict=True))
    torch._foreach_sub_(updates, kept)
    if wire not in (None, updates[0].dtype):
        rounded = [torch.empty_like(update, dtype=wire) for update in updates]
        copy_all_(zip(rounded, updates, strict=True))
        copy_all_(zip(updates, rounded, strict=True))
    add_all_(zip(kept, updates, strict=True))


AssignedSpan = tuple[int, int, Assignment, bool]
"""`(start, length, assignment, in_norm)` of a shard span."""


def joined(spans: Sequence[AssignedSpan]) -> list[AssignedSpan]:
    """Sort `spans` by start and merge adjacent spans that have the same assignment."""
    result: list[AssignedSpan] = []
    for start, length, assigned, in_norm in sorted(spans, key=lambda span: span[0]):
        kind = assigned, in_norm
        if result and result[-1][0] + result[-1][1] == start and result[-1][2:] == kind:
            start, length = result[-1][0], result.pop()[1] + length
        result.append((start, length, *kind))
    return result
