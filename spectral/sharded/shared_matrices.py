"""Updates matrices that are shared by several ranks under FSDP, HSDP, tensor parallelism and DDP.

    gradient shards --> momentum shards                    weight shards
                             |                                   ^
                             | exchange to owners                | updates, exchanged back
                             v                                   |
                     stacks of whole matrices ------ rule -------+

Each matrix has a single owner among all ranks in the mesh, so it is orthogonalised only once. All
state is sharded. Per-matrix state, such as singular vectors, is sent along with the matrix.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..batching import grouped
from ..device_values import surely_finite, unless_all
from ..division import SteppedUnit, numel_of, relative, sizes_of
from ..local_part import local_of
from ..parameter_state import Member
from ..rules import Report, Rule, Stack, State
from ..rules.base import Step, decay_
from ..stepping import Units, accumulate_, step_units
from .exchange import Exchange, Part, Transfer
from .placement import Placement, Work, place
from .ranks import RankGroup, flat_layout, flat_state, layout_of

STEP_GROUP_NUMEL = 2**26
"""Maximum number of parameter elements to exchange together; larger parameters are exchanged alone.
"""

MOMENTUM = "momentum"
WEIGHT = "weight"
UPDATE = "update"
ENTRIES = "entries"
Key = tuple[int, int, str]
"""(parameter index, matrix index, tensor being sent), where the tensor is MOMENTUM, WEIGHT, UPDATE
or a state entry."""


class SharedParameter:
    """A parameter that is sharded or replicated across several ranks.

    parameter  a DTensor, or a plain parameter replicated on every rank
    units      the parameter's matrices
    layout     each rank's part of the parameter
    entries    each rank's part of every per-matrix state entry
    """

    def __init__(self, member: Member, ranks: RankGroup) -> None:
        parameter = self.parameter = member.parameter
        self.rule = member.rule
        self.units = SteppedUnit.of(parameter, self.rule, member.division)
        self.layout = layout_of(parameter, ranks)
        self.entries = {
            name: flat_layout(last.start + last.shape.numel(), parameter, ranks)
            for name, last in self.units[-1].entries.items()
        }


class SharedMatrices:
    """An optimizer's shared parameters whose rules need whole matrices.

    Attributes:
        ranks: all ranks that hold shards or replicas.
        placement: the owner of each matrix.
    """

    def __init__(
        self,
        ranks: RankGroup,
        members: Iterable[Member],
        *,
        exchange_dtype: torch.dtype | None = None,
    ) -> None:
        """Choose owners; every rank must pass the same members in the same order.

        Momenta and updates are sent in `exchange_dtype`; None means no conversion.
        """
        self.ranks = ranks
        self.exchange_dtype = exchange_dtype
        self.parameters = [SharedParameter(member, ranks) for member in members]
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
        """Return the rank within `ranks` that updates matrix `unit` of parameter `index`."""
        return self.placement.owners[f"{index:06d}.{unit:06d}"]

    @torch.no_grad()
    def initial_states(self, weights: Sequence[Tensor]) -> list[State]:
        """Create each parameter's state. This is a collective.

        `weights` holds this rank's part of each parameter's weight. Elementwise entries, which are
        initialised to 0, are not returned.
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
            exchange.scatter(owned, local, weight)
        return states

    def step(self, rule: Rule, parts: Mapping[Tensor, Stack]) -> list[tuple[list[Tensor], Report]]:
        """Update parameters that have the same rule and dtype. This is a collective.

        Args:
            rule: the parameters' rule.
            parts: for each parameter, this rank's part of the weight, the gradient (may be
                overwritten) and all state entries, without a batch axis, and the parameter's step.
                The active flag must be the same for all parameters and ranks.

        Returns:
            (parameters, report) pairs for batches of matrices owned by this rank. A pair contains
            the parameter of each matrix, and one value of each metric per matrix.
        """
        groups: list[list[int]] = []  # consecutive parameters to exchange together
        size = 0
        for index in sorted(self.index[p] for p in parts):
            numel = self.parameters[index].parameter.numel()
            if not groups or size + numel > STEP_GROUP_NUMEL:
                groups.append([])
                size = 0
            groups[-1].append(index)
            size += numel
        reports = []
        for group in groups:
            reports += self._step_group(rule, tuple(group), parts)
        return reports

    def _step_group(
        self, rule: Rule, indices: tuple[int, ...], parts: Mapping[Tensor, Stack]
    ) -> list[tuple[list[Tensor], Report]]:
        members = [parts[self.parameters[i].parameter] for i in indices]
        accumulate_(
            rule,
            [part.grad[None] for part in members],
            [{k: part.state[k][None] for k in rule.elementwise_state} for part in members],
            members[0].step.active,
        )
        local: dict[tuple[int, str], Tensor] = {}
        for i, part in zip(indices, members, strict=True):
            local |= {(i, name): part.state[name] for name in self.parameters[i].entries}
            local |= {(i, MOMENTUM): part.grad, (i, WEIGHT): part.weight}
            local[i, UPDATE] = torch.empty_like(part.weight)
        like, wire = members[0].weight, self.exchange_dtype
        inward = (WEIGHT, ENTRIES) if rule.reads_weight else (ENTRIES,)
        exchanges: list[tuple[Exchange, torch.dtype | None]]
        if wire is None:
            exchanges = [(self._exchange(indices, (MOMENTUM, *inward), (UPDATE, ENTRIES)), None)]
        else:  # weights and state are sent in their own dtype
            exchanges = [
                (self._exchange(indices, (MOMENTUM,), (UPDATE,)), wire),
                (self._exchange(indices, inward, (ENTRIES,)), None),
            ]
        owned: dict[Key, Tensor] = {}
        for exchange, dtype in exchanges:
            owned |= self._gathered(exchange, local, like, dtype)
        reports = self._run(rule, owned, parts)
        stepped = [key for key in owned if key[2] == UPDATE]
        if rule.reads_weight and stepped:
            before = [owned[i, j, WEIGHT] for i, j, _ in stepped]
            torch._foreach_sub_([owned[key] for key in stepped], before)
        for exchange, dtype in exchanges:
            exchange.scatter(owned, local, like, dtype)
        self._add(rule, members, [local[i, UPDATE] for i in indices])
        return reports

    def _add(self, rule: Rule, members: Sequence[Stack], updates: Sequence[Tensor]) -> None:
        """Add updates to this rank's parts of the weights.

        If the rule does not read weights, the weights are decayed here. NaN marks a refused update,
        because such a mark takes no extra bytes or launches per matrix.
        """
        if rule.reads_weight:
            torch._foreach_add_([part.weight for part in members], [*updates])
            return
        sound = surely_finite([*updates])
        for part, update in zip(members, updates, strict=True):
            weight = part.weight
            before = None if sound else weight.clone()
            decay_(weight, *part.step, -update if rule.cautious else None)
            weight += update
            if before is not None:
                torch.where(update.isfinite(), weight, before, out=weight)

    def _run(
        self, rule: Rule, owned: dict[Key, Tensor], parts: Mapping[Tensor, Stack]
    ) -> list[tuple[list[Tensor], Report]]:
        """Update the matrices owned by this rank, in batches with equal shapes and rates."""

        def kind(pair: tuple[int, int]) -> tuple[object, ...]:
            unit = self.parameters[pair[0]].units[pair[1]]
            return unit.shape, parts[unit.parameter].step.rates

        shapes = grouped(((i, j) for i, j, name in owned if name == MOMENTUM), kind)
        groups = [
            _OwnedUnits(
                rule,
                [self.parameters[i].units[j] for i, j in members],
                members,
                owned,
                parts[self.parameters[members[0][0]].parameter].step,
            )
            for members in shapes.values()
        ]
        reports = step_units(rule, groups)
        return [
            ([self.parameters[i].parameter for i, _ in members], report)
            for members, report in zip(shapes.values(), reports, strict=True)
        ]

    def _exchange(
        self, indices: tuple[int, ...], inward: tuple[str, ...], outward: tuple[str, ...]
    ) -> Exchange:
        """Return the exchange for a set of parameters, planned on first use.

        `inward` and `outward` list the tensors to send: MOMENTUM, WEIGHT, UPDATE and ENTRIES.
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
        """Plan the transfers of a matrix, or of its state entries, to its owner and back.

        The owner receives parts only from the copy of the tensor that its own part belongs to.
        """
        shared, owner = self.parameters[i], self.owner(i, j)
        unit = shared.units[j]
        boxes = {name: (unit.box, shared.layout)}
        if name == ENTRIES:
            boxes = {k: (unit.entries[k].box, layout) for k, layout in shared.entries.items()}
        transfers = []
        for key, (box, layout) in boxes.items():
            parts = tuple(
                Part(rank, (i, key), relative(common, layout.boxes[rank]), relative(common, box))
                for rank, common in layout.parts(box).items()
            )
            near = layout.copies[owner]
            sources = tuple(part for part in parts if layout.copies[part.rank] == near)
            transfers.append(Transfer((i, j, key), owner, sources, parts))
        return transfers

    def _gathered(
        self,
        exchange: Exchange,
        local: Mapping[tuple[int, str], Tensor],
        like: Tensor,
        wire: torch.dtype | None,
    ) -> dict[Key, Tensor]:
        """Gather each matrix on its owner, and return the matrices owned by this rank.

        `local` holds this rank's parts of parameters and state entries.
        """
        owned = {}
        for key in exchange.owned_matrices:
            unit = self.parameters[key[0]].units[key[1]]
            box = unit.entries[key[2]].box if key[2] in unit.entries else unit.box
            owned[key] = like.new_empty(sizes_of(box))
        exchange.gather(local, owned, like, wire)
        return owned


class _OwnedUnits(Units):
    """Matrices of the same kind that are owned by this rank.

    `members` lists the (parameter index, matrix index) pair of each matrix. Momenta, weights and
    state entries are read from `owned`; new state entries and UPDATE are written to `owned`. UPDATE
    is the new weight or, if the old weight was not sent, the change in the weight.
    """

    def __init__(
        self,
        rule: Rule,
        units: Sequence[SteppedUnit],
        members: Sequence[tuple[int, int]],
        owned: dict[Key, Tensor],
        step: Step,
    ) -> None:
        momentum = owned[*members[0], MOMENTUM]
        super().__init__(units[0].shape, momentum.dtype, momentum.device, len(units))
        self.rule, self.units, self.members = rule, units, members
        self.owned, self.step = owned, step

    def take(self, part: slice) -> Stack:
        """Stack matrices. Weights are zeros if the rule does not read them."""
        momentum = self._stacked(MOMENTUM, part)
        reads = self.rule.reads_weight
        weight = self._stacked(WEIGHT, part) if reads else torch.zeros_like(momentum)
        state = {
            name: torch.stack([self.owned[i, j, name] for i, j in self.members[part]]).view(
                -1, *entry.shape
            )
            for name, entry in self.units[0].entries.items()
        }
        return Stack(weight, momentum, state, self.step)

    def put(self, part: slice, stack: Stack, report: Report) -> None:
        """Store new weights and state. If weights were not sent, NaN marks a refused update."""
        if not self.rule.reads_weight and "refused" in report:
            sound = unless_all(report["refused"] == 0)
            if sound is not None:
                stack.weight.masked_fill_(~sound.view(-1, 1, 1), torch.nan)
        for row, ((i, j), unit) in enumerate(
            zip(self.members[part], self.units[part], strict=True)
        ):
            self.owned[i, j, UPDATE] = unit.part(stack.weight[row])
            for name, value in stack.state.items():
                self.owned[i, j, name] = value[row].reshape(-1)

    def _stacked(self, name: str, part: slice) -> Tensor:
        pairs = zip(self.units[part], self.members[part], strict=True)
        return torch.stack([unit.matrix(self.owned[i, j, name]) for unit, (i, j) in pairs])
