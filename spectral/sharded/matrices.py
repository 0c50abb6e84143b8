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
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..division import Box, Division, intersection, narrowed, numel_of, relative
from ..local_part import local_of
from ..rules import Report, Rule, Stack, State, Step
from ..rules.base import Rate, decay_, rate_of_stack
from ..stepped_unit import entry_shapes
from ..stepping import step_units
from .copies import copy_all_
from .dtensors import TensorLayout, flat_layout, flat_state, layout_of
from .exchange import TransferPlan, packed, unpacked
from .placement import Placement, Work, place
from .ranks import RankGroup

STEP_GROUP_NUMEL = 2**26
"""Elements of the parameters that are exchanged together, unless one alone is larger."""

MOMENTUM = "momentum"
WEIGHT = "weight"
ENTRIES = "entries"
Key = tuple[int, int, str]
"""Parameter, matrix within it, and what is sent: MOMENTUM, WEIGHT or an entry of the state."""
Shape = tuple[int, ...]


class BoxPart(NamedTuple):
    """What one rank holds of a matrix, or of an entry of its state."""

    rank: int
    local: Box  # within the rank's part of the tensor
    whole: Box  # within the matrix

    @property
    def numel(self) -> int:
        """Number of elements."""
        return numel_of(self.local)


@dataclass(frozen=True)
class BoxTransfer:
    """The way of one matrix, or of an entry of its state, to its owner and back."""

    owner: int
    key: Key
    shape: Shape
    sources: tuple[BoxPart, ...]  # of the copy that the owner has a part of
    targets: tuple[BoxPart, ...]  # of all copies


def transfer(owner: int, key: Key, box: Box, layout: TensorLayout) -> BoxTransfer:
    """Plan the way of the part `box` of a tensor."""
    parts = []
    for rank, held in enumerate(layout.boxes):
        common = intersection(held, box)
        if common is not None:
            parts.append(BoxPart(rank, relative(common, held), relative(common, box)))
    near = layout.copies[owner]
    sources = tuple(part for part in parts if layout.copies[part.rank] == near)
    return BoxTransfer(owner, key, tuple(n for _, n in box), sources, tuple(parts))


@dataclass(frozen=True)
class SharedParameter:
    """A parameter of which several ranks hold parts or copies.

    parameter  a DTensor, or a plain parameter with a copy on every rank
    boxes      where its matrices lie
    shapes     of its matrices, `(rows, cols)`, or `(n,)` of a vector
    layout     which part of it each rank holds
    """

    parameter: Tensor
    rule: Rule
    division: Division
    boxes: tuple[Box, ...]
    shapes: tuple[Shape, ...]
    layout: TensorLayout

    def entry_shapes(self, dtype: torch.dtype) -> dict[str, list[torch.Size]]:
        """Return the shapes of the state that belongs to each matrix as a whole, by entry."""
        each = [entry_shapes(self.rule, shape, dtype) for shape in self.shapes]
        return {name: [shapes[name] for shapes in each] for name in each[0]}


@dataclass
class Exchange:
    """The two all-to-alls of some matrices."""

    ranks: RankGroup
    inward: list[BoxTransfer]
    outward: list[BoxTransfer]
    to_owner: TransferPlan[BoxTransfer, BoxPart] = field(init=False)
    from_owner: TransferPlan[BoxTransfer, BoxPart] = field(init=False)

    def __post_init__(self) -> None:
        ranks = self.ranks.rank, self.ranks.size
        self.to_owner = TransferPlan(self.inward, *ranks, lambda each: each.sources)
        self.from_owner = TransferPlan(self.outward, *ranks, lambda each: each.targets)

    def gather(
        self,
        local: Mapping[tuple[int, str], Tensor],
        like: Tensor,
        wire: torch.dtype | None = None,
    ) -> dict[Key, Tensor]:
        """Bring what the ranks hold of each matrix to its owner; returns what is owned here.

        `local` has this rank's part of a parameter, or of an entry of its state; `like` gives
        dtype and device. Elements are sent as `wire`, None for the dtype of `like`.
        """
        plan = self.to_owner
        sources = [narrowed(_of(local, each), part.local) for each, part in plan.shard_side]
        send = packed(sources, like, wire)
        received = self.ranks.all_to_all(send, plan.owner_counts, plan.shard_counts)
        owned = {t.key: like.new_empty(t.shape) for t in self.inward if t.owner == self.ranks.rank}
        targets = [narrowed(owned[each.key], part.whole) for each, part in plan.owner_side]
        copy_all_(zip(targets, unpacked(received, targets), strict=True))
        return owned

    def scatter(
        self,
        owned: Mapping[Key, Tensor],
        local: Mapping[tuple[int, str], Tensor],
        like: Tensor,
        wire: torch.dtype | None = None,
    ) -> None:
        """Write what owners have of each matrix to the ranks that hold it, into `local`."""
        plan = self.from_owner
        send = packed(
            [narrowed(owned[each.key], part.whole) for each, part in plan.owner_side], like, wire
        )
        received = self.ranks.all_to_all(send, plan.shard_counts, plan.owner_counts)
        targets = [narrowed(_of(local, each), part.local) for each, part in plan.shard_side]
        copy_all_(zip(targets, unpacked(received, targets), strict=True))


def _of(local: Mapping[tuple[int, str], Tensor], each: BoxTransfer) -> Tensor:
    index, _, name = each.key
    return local[index, name]


@dataclass(frozen=True)
class OwnedMatrices:
    """Matrices of one shape that this rank owns; see `spectral.stepping`.

    units   parameter and matrix of each
    owned   momenta, weights and entries of the state, from which they are taken and to which new
            weights, or changes of them, and state are put
    """

    rule: Rule
    parameters: Sequence[SharedParameter]
    units: list[tuple[int, int]]
    owned: dict[Key, Tensor]
    rates: Mapping[Tensor, Rate]
    weight_decay: Rate
    active: Tensor | None

    @property
    def shape(self) -> Shape:
        """Shape of each matrix."""
        i, unit = self.units[0]
        return self.parameters[i].shapes[unit]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the momenta."""
        return self.owned[*self.units[0], MOMENTUM].dtype

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.owned[*self.units[0], MOMENTUM].device

    def __len__(self) -> int:
        """Count the matrices."""
        return len(self.units)

    def take(self, part: slice) -> Stack:
        """Stack matrices, of which a rule that does not read the weight gets zeros."""
        units = self.units[part]
        momentum = self._stacked(MOMENTUM, units)
        reads = self.rule.reads_weight
        weight = self._stacked(WEIGHT, units) if reads else torch.zeros_like(momentum)
        state = {
            name: torch.stack([self.owned[*unit, name] for unit in units]).view(-1, *shape)
            for name, shape in entry_shapes(self.rule, self.shape, self.dtype).items()
        }
        lr = rate_of_stack([self.rates[self.parameters[i].parameter] for i, _ in units], weight)
        return Stack(weight, momentum, state, Step(lr, self.weight_decay, self.active))

    def put(self, part: slice, stack: Stack, report: Report) -> None:
        """Keep new weights and state, or NaN as the change of a weight that was refused."""
        if not self.rule.reads_weight and "refused" in report:
            refused = report["refused"].view(-1, *(1,) * (stack.weight.ndim - 1)) > 0
            stack.weight.masked_fill_(refused, torch.nan)
        for row, (i, unit) in enumerate(self.units[part]):
            shared = self.parameters[i]
            shape = tuple(n for _, n in shared.boxes[unit])
            self.owned[i, unit, WEIGHT] = shared.division.part(stack.weight[row], shape)
            for name, value in stack.state.items():
                self.owned[i, unit, name] = value[row].reshape(-1)

    def _stacked(self, name: str, units: Sequence[tuple[int, int]]) -> Tensor:
        parts = ((self.parameters[i].division, self.owned[i, unit, name]) for i, unit in units)
        return torch.stack([division.matrix(part) for division, part in parts])


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
        self.parameters = [_shared(*each, ranks) for each in parameters]
        self.index = {shared.parameter: i for i, shared in enumerate(self.parameters)}
        works = [
            Work(f"{i:06d}.{j:06d}", shared.rule.cost(shape), _holders(shared.layout, box))
            for i, shared in enumerate(self.parameters)
            for j, (box, shape) in enumerate(zip(shared.boxes, shared.shapes, strict=True))
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
            shapes = shared.entry_shapes(weight.dtype)
            state = {
                name: flat_state(sum(map(prod, each)), shared.parameter, weight.dtype)
                for name, each in shapes.items()
            }
            states.append(state)
            if not state:
                continue
            exchange = self._exchange((i,), weight.dtype, (WEIGHT,), (ENTRIES,))
            owned = exchange.gather({(i, WEIGHT): weight}, weight)
            found: dict[Key, Tensor] = {}
            for (_, unit, _), part in owned.items():
                own = shared.rule.init_state(shared.division.matrix(part)[None])
                found |= {(i, unit, name): own[name][0].reshape(-1) for name in state}
            local = {(i, name): local_of(value) for name, value in state.items()}
            exchange.scatter(found, local, weight)
        return states

    @torch.no_grad()
    def step(
        self,
        rule: Rule,
        gradients: Mapping[Tensor, Tensor],
        weights: Mapping[Tensor, Tensor],
        states: Mapping[Tensor, State],
        rates: Mapping[Tensor, Rate],
        *,
        weight_decay: Rate,
        active: Tensor | None,
    ) -> list[tuple[list[Tensor], Report]]:
        """Step parameters of one rule and dtype; a collective.

        Args:
            rule: of all parameters.
            gradients: this rank's part of the gradient by parameter; may be overwritten.
            weights, states: this rank's parts of weights and of all entries of the state.
            rates: learning rate of each parameter.
            weight_decay: of all.
            active: 0-d bool, the same on every rank; see `Rule.step`.

        Returns:
            Figures of the matrices that this rank owns: the parameter of each row, and the report.
        """
        reports = []
        for indices in self._step_groups([self.index[p] for p in gradients]):
            reports += self._step_group(
                rule, indices, gradients, weights, states, rates, weight_decay, active
            )
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
        self,
        rule: Rule,
        indices: tuple[int, ...],
        gradients: Mapping[Tensor, Tensor],
        weights: Mapping[Tensor, Tensor],
        states: Mapping[Tensor, State],
        rates: Mapping[Tensor, Rate],
        weight_decay: Rate,
        active: Tensor | None,
    ) -> list[tuple[list[Tensor], Report]]:
        local: dict[tuple[int, str], Tensor] = {}
        for i in indices:
            parameter = self.parameters[i].parameter
            state = states[parameter]
            own = {name: state[name][None] for name in rule.elementwise_state}
            (momentum,) = rule.accumulate([gradients[parameter][None]], [own], active)
            local |= {(i, name): v for name, v in state.items() if name not in own}
            local[i, MOMENTUM] = momentum[0]
            local[i, WEIGHT] = weights[parameter]
        like = local[indices[0], WEIGHT]
        wire = self.exchange_dtype
        if rule.reads_weight and wire is not None:  # the weight and the state are sent as they are
            momenta = self._exchange(indices, like.dtype, (MOMENTUM,), ())
            exchange = self._exchange(indices, like.dtype, (WEIGHT, ENTRIES), (WEIGHT, ENTRIES))
            owned = momenta.gather(local, like, wire) | exchange.gather(local, like)
        else:
            sent = (MOMENTUM, WEIGHT, ENTRIES) if rule.reads_weight else (MOMENTUM, ENTRIES)
            exchange = self._exchange(indices, like.dtype, sent, (WEIGHT, ENTRIES))
            owned = exchange.gather(local, like, wire)
        reports = self._run(rule, owned, rates, weight_decay, active)
        if rule.reads_weight:
            exchange.scatter(owned, local, like)
            return reports
        # What came is the change of the weights, NaN where it was refused.
        changes = {(i, WEIGHT): torch.empty_like(local[i, WEIGHT]) for i in indices}
        exchange.scatter(owned, local | changes, like, wire)
        for i in indices:
            weight, change = local[i, WEIGHT], changes[i, WEIGHT]
            new = weight.clone()[None]
            decay_(new, rates[self.parameters[i].parameter], weight_decay, active)
            weight.copy_(torch.where(change.isfinite(), new[0] + change, weight))
        return reports

    def _run(
        self,
        rule: Rule,
        owned: dict[Key, Tensor],
        rates: Mapping[Tensor, Rate],
        weight_decay: Rate,
        active: Tensor | None,
    ) -> list[tuple[list[Tensor], Report]]:
        """Step the matrices that this rank owns, those of one shape together."""
        shapes: dict[Shape, list[tuple[int, int]]] = {}
        for i, unit, name in owned:
            if name == MOMENTUM:
                shapes.setdefault(self.parameters[i].shapes[unit], []).append((i, unit))
        groups = [
            OwnedMatrices(rule, self.parameters, units, owned, rates, weight_decay, active)
            for units in shapes.values()
        ]
        reports = step_units(rule, groups, accumulates=False)
        return [
            ([self.parameters[i].parameter for i, _ in group.units], report)
            for group, report in zip(groups, reports, strict=True)
        ]

    def _exchange(
        self,
        indices: tuple[int, ...],
        dtype: torch.dtype,
        inward: tuple[str, ...],
        outward: tuple[str, ...],
    ) -> Exchange:
        """Return the exchange of parameters, planned at the first time.

        `inward` and `outward` say which of MOMENTUM, WEIGHT and ENTRIES are sent.
        """
        key = indices, dtype, inward, outward
        if key not in self._exchanges:
            ways: tuple[list[BoxTransfer], list[BoxTransfer]] = [], []
            for i in indices:
                shared = self.parameters[i]
                for unit, box in enumerate(shared.boxes):
                    owner = self.owner(i, unit)
                    entries = self._entry_transfers(i, unit, dtype)
                    for way, names in zip(ways, (inward, outward), strict=True):
                        own = [n for n in names if n != ENTRIES]
                        way += [transfer(owner, (i, unit, n), box, shared.layout) for n in own]
                        way += entries if ENTRIES in names else []
            self._exchanges[key] = Exchange(self.ranks, *ways)
        return self._exchanges[key]

    def _entry_transfers(self, i: int, unit: int, dtype: torch.dtype) -> list[BoxTransfer]:
        """Plan the ways of the entries of one matrix's state, flat within the parameter's."""
        shared, found = self.parameters[i], []
        for name, shapes in shared.entry_shapes(dtype).items():
            sizes = [prod(shape) for shape in shapes]
            layout = flat_layout(sum(sizes), shared.parameter, self.ranks)
            box = ((sum(sizes[:unit]), sizes[unit]),)
            found.append(transfer(self.owner(i, unit), (i, unit, name), box, layout))
        return found


def _shared(parameter: Tensor, rule: Rule, division: Division, ranks: RankGroup) -> SharedParameter:
    boxes = tuple(division.boxes(parameter.shape))
    shapes = tuple(
        tuple(division.matrix(torch.empty([n for _, n in box], device="meta")).shape)
        for box in boxes
    )
    return SharedParameter(parameter, rule, division, boxes, shapes, layout_of(parameter, ranks))


def _holders(layout: TensorLayout, box: Box) -> dict[int, int]:
    """Count the elements of a matrix that each rank holds."""
    parts = ((rank, intersection(held, box)) for rank, held in enumerate(layout.boxes))
    return {rank: numel_of(part) for rank, part in parts if part is not None}
