"""The step of matrices that several ranks share: FSDP, HSDP, tensor parallelism and DDP.

    gradient shards --> momentum shards                    weight shards
                             |                                   ^
                             | one all-to-all to owners          | one all-to-all back
                             v                                   |
                     stacks of whole matrices ------ rule -------+

Each matrix has one owner among all ranks of the mesh, so it is orthogonalised once. All state is
sharded: what belongs to a matrix as a whole, such as its singular vectors, is sent with it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..batching import copy_all_, grouped
from ..device_values import surely_finite, unless_all
from ..division import Box, Division, SteppedUnit, numel_of, relative, sizes_of
from ..local_part import local_of
from ..rules import Report, Rule, Stack, State
from ..rules.base import decay_
from ..stepping import Units, step_units
from .exchange import Exchange, Part, Transfer, local_pairs, unpacked
from .placement import Placement, Work, place
from .ranks import RankGroup, TensorLayout, flat_layout, flat_state, layout_of

STEP_GROUP_NUMEL = 2**26
"""Elements of the parameters that are exchanged together, unless one alone is larger."""

MOMENTUM = "momentum"
WEIGHT = "weight"
ENTRIES = "entries"
Key = tuple[int, int, str]
"""Parameter, matrix within it, and what is sent: MOMENTUM, WEIGHT or an entry of the state."""


def transfer(owner: int, key: Key, box: Box, layout: TensorLayout) -> Transfer:
    """Plan the way of the part `box` of a tensor, from the copy that its owner has a part of."""
    tensor, near = (key[0], key[2]), layout.copies[owner]
    parts = tuple(
        Part(rank, tensor, relative(common, layout.boxes[rank]), relative(common, box))
        for rank, common in layout.parts(box).items()
    )
    sources = tuple(part for part in parts if layout.copies[part.rank] == near)
    return Transfer(key, owner, sources, parts)


@dataclass(frozen=True)
class SharedParameter:
    """A parameter of which several ranks hold parts or copies.

    parameter  a DTensor, or a plain parameter with a copy on every rank
    units      its matrices
    layout     which part of it each rank holds
    entries    which part each rank holds of every entry of the state that belongs to matrices as a
               whole
    """

    parameter: Tensor
    rule: Rule
    units: list[SteppedUnit]
    layout: TensorLayout
    entries: Mapping[str, TensorLayout]

    @classmethod
    def of(cls, parameter: Tensor, rule: Rule, division: Division, ranks: RankGroup) -> Self:
        """Say how `ranks` share the matrices of a parameter."""
        units = SteppedUnit.of(parameter, rule, division)
        entries = {
            name: flat_layout(last.start + last.shape.numel(), parameter, ranks)
            for name, last in units[-1].entries.items()
        }
        return cls(parameter, rule, units, layout_of(parameter, ranks), entries)


class SharedMatrices:
    """The parameters of one optimizer, under whole-matrix rules, that several ranks share.

    Attributes:
        ranks: all ranks that hold parts or copies.
        placement: the owner of each matrix.
    """

    def __init__(
        self,
        ranks: RankGroup,
        parameters: Iterable[tuple[Tensor, Rule, Division]],
        *,
        exchange_dtype: torch.dtype | None = None,
    ) -> None:
        """Choose owners. Every rank passes the same parameters in the same order.

        Momenta, and updates that come alone, are sent as `exchange_dtype`, None for their own.
        """
        self.ranks = ranks
        self.exchange_dtype = exchange_dtype
        self.parameters = [SharedParameter.of(*member, ranks) for member in parameters]
        self.index = {shared.parameter: i for i, shared in enumerate(self.parameters)}
        works = [
            Work(
                f"{i:06d}.{j:06d}",
                shared.rule.cost(unit.shape),
                {rank: numel_of(part) for rank, part in shared.layout.parts(unit.box).items()},
            )
            for i, shared in enumerate(self.parameters)
            for j, unit in enumerate(shared.units)
        ]
        self.placement: Placement = place("auto", works, ranks.size)
        self._exchanges: dict[tuple[object, ...], Exchange] = {}

    def owner(self, index: int, unit: int) -> int:
        """Return the rank, within `ranks`, that steps a matrix of a parameter."""
        return self.placement.owners[f"{index:06d}.{unit:06d}"]

    @torch.no_grad()
    def initial_states(self, weights: Sequence[Tensor]) -> list[State]:
        """Create the state of each parameter; a collective.

        `weights` are this rank's parts of the weights that are stepped, one for each parameter.
        Elementwise entries are not among what is returned: they start at 0.
        """
        states: list[State] = []
        for i, (shared, weight) in enumerate(zip(self.parameters, weights, strict=True)):
            state = {
                name: flat_state(layout, shared.parameter, self.ranks.rank, weight.dtype)
                for name, layout in shared.entries.items()
            }
            states.append(state)
            if not state:
                continue
            exchange = self._exchange((i,), (WEIGHT,), (ENTRIES,))
            owned = self._gathered(exchange, {(i, WEIGHT): weight}, weight, None)
            for _, j, _ in [*owned]:
                own = shared.rule.init_state(shared.units[j].matrix(owned[i, j, WEIGHT])[None])
                owned |= {(i, j, name): own[name][0].reshape(-1) for name in state}
            local = {(i, name): local_of(value) for name, value in state.items()}
            self._scatter(exchange, owned, local, weight, None)
        return states

    def step(self, rule: Rule, parts: Mapping[Tensor, Stack]) -> list[tuple[list[Tensor], Report]]:
        """Step parameters of one rule and dtype; a collective.

        Args:
            rule: of all parameters.
            parts: by parameter, this rank's parts of weight, gradient, which may be overwritten,
                and all entries of the state, without an axis of a batch; and its step, with one
                weight decay and predicate, the same on every rank.

        Returns:
            Figures of the matrices that this rank owns: the parameter of each row, and the report.
        """
        reports = []
        for indices in self._step_groups([self.index[p] for p in parts]):
            reports += self._step_group(rule, indices, parts)
        return reports

    def _step_groups(self, indices: Iterable[int]) -> Iterable[tuple[int, ...]]:
        """Yield consecutive parameters whose matrices are exchanged together."""
        group: list[int] = []
        size = 0
        for index in sorted(indices):
            numel = self.parameters[index].parameter.numel()
            if group and size + numel > STEP_GROUP_NUMEL:
                yield tuple(group)
                group, size = [], 0
            group.append(index)
            size += numel
        if group:
            yield tuple(group)

    def _step_group(
        self, rule: Rule, indices: tuple[int, ...], parts: Mapping[Tensor, Stack]
    ) -> list[tuple[list[Tensor], Report]]:
        local: dict[tuple[int, str], Tensor] = {}
        members = [parts[self.parameters[i].parameter] for i in indices]
        momenta = rule.accumulate(
            [part.grad[None] for part in members],
            [{k: part.state[k][None] for k in rule.elementwise_state} for part in members],
            members[0].step.active,
        )
        for i, part, momentum in zip(indices, members, momenta, strict=True):
            local |= {(i, name): part.state[name] for name in self.parameters[i].entries}
            local |= {(i, MOMENTUM): momentum[0], (i, WEIGHT): part.weight}
        like = local[indices[0], WEIGHT]
        reads, wire = rule.reads_weight, self.exchange_dtype
        kept = (WEIGHT, ENTRIES) if reads else (ENTRIES,)
        if wire is not None and (reads or self.parameters[indices[0]].entries):
            # The weight that is read, and the state, are sent as they are.
            exchanges = [
                (self._exchange(indices, (MOMENTUM,), () if reads else (WEIGHT,)), wire),
                (self._exchange(indices, kept, kept), None),
            ]
        else:
            exchanges = [(self._exchange(indices, (MOMENTUM, *kept), (WEIGHT, ENTRIES)), wire)]
        owned: dict[Key, Tensor] = {}
        for exchange, dtype in exchanges:
            owned |= self._gathered(exchange, local, like, dtype)
        reports = self._run(rule, owned, parts)
        # Without the weight, what comes back is its change, NaN where it was refused.
        changed = () if reads else indices
        changes = {(i, WEIGHT): torch.empty_like(local[i, WEIGHT]) for i in changed}
        for exchange, dtype in exchanges:
            self._scatter(exchange, owned, local | changes, like, dtype)
        if reads:
            return reports
        sound = surely_finite([*changes.values()])
        for i, part in zip(indices, members, strict=True):
            weight, change = part.weight, changes[i, WEIGHT]
            old = None if sound else weight.clone()
            decay_(weight, *part.step, -change if rule.cautious else None)
            weight += change
            if old is not None:
                torch.where(change.isfinite(), weight, old, out=weight)
        return reports

    def _run(
        self, rule: Rule, owned: dict[Key, Tensor], parts: Mapping[Tensor, Stack]
    ) -> list[tuple[list[Tensor], Report]]:
        """Step the matrices that this rank owns, those of one shape and rate together."""

        def kind(pair: tuple[int, int]) -> tuple[object, ...]:
            unit = self.parameters[pair[0]].units[pair[1]]
            return unit.shape, parts[unit.parameter].step.rates

        shapes = grouped(((i, j) for i, j, name in owned if name == MOMENTUM), kind)
        groups = [self._units(rule, members, owned, parts) for members in shapes.values()]
        reports = step_units(rule, groups)
        return [
            ([self.parameters[i].parameter for i, _ in members], report)
            for members, report in zip(shapes.values(), reports, strict=True)
        ]

    def _units(
        self,
        rule: Rule,
        members: list[tuple[int, int]],
        owned: dict[Key, Tensor],
        parts: Mapping[Tensor, Stack],
    ) -> Units:
        """Return matrices of one kind, each by parameter and number, to be stepped in `owned`.

        From momenta, weights and entries of the state there. New weights, or changes of them, and
        new state take their place.
        """
        units = [self.parameters[i].units[j] for i, j in members]
        like = owned[*members[0], MOMENTUM]

        def stacked(name: str, part: slice) -> Tensor:
            pairs = zip(units[part], members[part], strict=True)
            return torch.stack([unit.matrix(owned[i, j, name]) for unit, (i, j) in pairs])

        def take(part: slice) -> Stack:
            momentum = stacked(MOMENTUM, part)
            # A rule that does not read the weight gets zeros.
            weight = stacked(WEIGHT, part) if rule.reads_weight else torch.zeros_like(momentum)
            state = {
                name: torch.stack([owned[i, j, name] for i, j in members[part]]).view(
                    -1, *entry.shape
                )
                for name, entry in units[0].entries.items()
            }
            return Stack(weight, momentum, state, parts[units[0].parameter].step)

        def put(part: slice, stack: Stack, report: Report) -> None:
            """Keep new weights and state, or NaN as the change of a weight that was refused."""
            if not rule.reads_weight and "refused" in report:
                sound = unless_all(report["refused"] == 0)
                if sound is not None:
                    stack.weight.masked_fill_(~sound.view(-1, 1, 1), torch.nan)
            for row, ((i, j), unit) in enumerate(zip(members[part], units[part], strict=True)):
                owned[i, j, WEIGHT] = unit.part(stack.weight[row])
                for name, value in stack.state.items():
                    owned[i, j, name] = value[row].reshape(-1)

        return Units(units[0].shape, like.dtype, like.device, len(units), take, put)

    def _exchange(
        self, indices: tuple[int, ...], inward: tuple[str, ...], outward: tuple[str, ...]
    ) -> Exchange:
        """Return the exchange of parameters, planned at the first time.

        `inward` and `outward` say which of MOMENTUM, WEIGHT and ENTRIES are sent.
        """
        key = indices, inward, outward
        if key not in self._exchanges:
            ways: tuple[list[Transfer], list[Transfer]] = [], []
            for i in indices:
                for j in range(len(self.parameters[i].units)):
                    for way, names in zip(ways, (inward, outward), strict=True):
                        for name in names:
                            way += self._transfers(i, j, name)
            send = self.ranks.all_to_all
            exchange = Exchange(*ways, self.ranks.rank, self.ranks.size, send, send)
            self._exchanges[key] = exchange
        return self._exchanges[key]

    def _transfers(self, i: int, j: int, name: str) -> list[Transfer]:
        """Plan the ways of one matrix, or of the entries of its state."""
        shared, owner = self.parameters[i], self.owner(i, j)
        unit = shared.units[j]
        if name != ENTRIES:
            return [transfer(owner, (i, j, name), unit.box, shared.layout)]
        return [
            transfer(owner, (i, j, entry), unit.entries[entry].box, layout)
            for entry, layout in shared.entries.items()
        ]

    def _gathered(
        self,
        exchange: Exchange,
        local: Mapping[tuple[int, str], Tensor],
        like: Tensor,
        wire: torch.dtype | None,
    ) -> dict[Key, Tensor]:
        """Bring what the ranks hold of each matrix to its owner; returns what is owned here.

        `local` has this rank's part of a parameter, or of an entry of its state.
        """
        owned = {}
        for key in exchange.owned_matrices:
            unit = self.parameters[key[0]].units[key[1]]
            box = unit.entries[key[2]].box if key[2] in unit.entries else unit.box
            owned[key] = like.new_empty(sizes_of(box))
        exchange.gather(local, owned, like, wire)
        return owned

    def _scatter(
        self,
        exchange: Exchange,
        owned: Mapping[Key, Tensor],
        local: Mapping[tuple[int, str], Tensor],
        like: Tensor,
        wire: torch.dtype | None,
    ) -> None:
        """Write what owners have of each matrix to the ranks that hold it, into `local`."""
        copy_all_(
            (place, part) for part, place in local_pairs(exchange.outward.local, owned, local)
        )
        targets, received = exchange.scatter(owned, local, like, wire)
        copy_all_(zip(targets, unpacked(received, targets), strict=True))
