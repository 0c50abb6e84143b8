"""Updates many units in batches that fit in the workspace.

All optimizers update their units through `step_units`. A group of units is an instance of `Units`,
whose methods return units as stacks and store the updated stacks. `ParameterUnits` are units that
one process updates alone. Other subclasses implement sharded matrices, and the stacks and PC layers
of the distributed optimizer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from .batching import concat, copy_all_
from .division import SteppedUnit
from .kernels.dispatch import device_name, listed
from .local_part import local_gradient, local_of
from .parameter_state import MASTER, entry_names
from .polar import workspace, workspace_units
from .rules import Report, Rule, Stack, State, Step

Batch = list[tuple[int, slice]]
"""The units in one call to a rule: (group index, units within the group) pairs."""


class Units(ABC):
    """Units with the same shape, dtype and device.

    Attributes:
        shape: shape of each unit.
        dtype, device: dtype and device of the units' weights.
        count: number of units.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, count: int
    ) -> None:
        self.shape, self.dtype, self.device, self.count = shape, dtype, device, count

    @abstractmethod
    def take(self, part: slice) -> Stack:
        """Return some of the units as a stack."""

    @abstractmethod
    def put(self, part: slice, stack: Stack, report: Report) -> None:
        """Store an updated stack. `report` is the rule's report on the stack."""


def step_units(
    rule: Rule,
    groups: Sequence[Units],
    *,
    spread: Callable[[Sequence[Batch]], Iterable[Batch]] = iter,
) -> list[Report]:
    """Update groups of units with a rule, and return each group's report, `[units]` per metric.

    Gradients must be results of `accumulate_`. `spread` yields the given batches in order. The
    batches are independent, so `spread` may select a different stream for each batch. Call this
    function under `torch.no_grad()`.
    """
    reports: list[list[Report]] = [[] for _ in groups]
    for batch in spread(batches(rule, groups)):
        stacks = [groups[i].take(part) for i, part in batch]
        updated = rule.update(stacks)
        if not (isinstance(updated, list) and len(updated) == len(stacks)):
            raise TypeError(
                f"{type(rule).__name__}.update must return a list of {len(stacks)} reports, one "
                f"per stack, got {type(updated).__name__}"
            )
        for (i, part), stack, report in zip(batch, stacks, updated, strict=True):
            groups[i].put(part, stack, report)
            reports[i].append(report)
        del stacks, stack  # free them before the next batch is stacked
    # Concatenate the reports on consecutive parts of each group.
    return [
        {name: concat([report[name] for report in parts]) for name in parts[0]} for parts in reports
    ]


def batches(rule: Rule, groups: Sequence[Units]) -> list[Batch]:
    """Determine the units in each call to the rule.

    Elementwise rules update all units with the same dtype and device in one call. Whole-matrix
    rules update as many units of the same shape as fit in the workspace. On devices with kernels, a
    call also includes units of other shapes with the same shorter side, because such units share
    work.
    """
    planned: list[Batch] = []
    open_: dict[object, tuple[Batch, int]] = {}
    for i, units in enumerate(groups):
        numel, limit = prod(units.shape), workspace(units.device)
        size = workspace_units(numel, units.device) if rule.whole_matrix else units.count
        key = units.dtype, units.device, rule.whole_matrix and min(units.shape)
        joins = not rule.whole_matrix or listed(device_name(units.device))
        for first in range(0, units.count, size):
            part = slice(first, min(first + size, units.count))
            count = numel * (part.stop - part.start)
            batch, before = open_.get(key, ([], 0)) if joins else ([], 0)
            if rule.whole_matrix and before + count > limit:
                batch, before = [], 0
            if not batch:
                planned.append(batch)
            batch.append((i, part))
            open_[key] = batch, before + count
    return planned


def elements_of(groups: Sequence[Units], batch: Batch) -> int:
    """Return the number of elements in a batch's units."""
    return sum(prod(groups[i].shape) * (part.stop - part.start) for i, part in batch)


def accumulate_(
    rule: Rule,
    grads: Sequence[Tensor],
    states: Sequence[State],
    active: Tensor | None,
    dtype: torch.dtype | None = None,
) -> None:
    """Replace gradients with the results of `rule.accumulate`, computed in `dtype`.

    None means the dtype of the gradients. Results are rounded to the dtypes of the gradients and
    states.
    """
    dtype = grads[0].dtype if dtype is None else dtype
    wide = [grad.to(dtype) for grad in grads]
    means = [{name: state[name].to(dtype) for name in rule.elementwise_state} for state in states]
    results = rule.accumulate(wide, means, active)
    pairs = [*zip(grads, results, strict=True)]
    for state, mean in zip(states, means, strict=True):
        pairs += [(state[name], value) for name, value in mean.items()]
    copy_all_((kept, value) for kept, value in pairs if kept.dtype != value.dtype)


class ParameterUnits(Units):
    """Units with the same shape, rule and step that this rank updates alone.

    `state` maps parameters to their optimizer state, into which `take` accumulates the gradients.
    """

    def __init__(
        self, rule: Rule, units: list[SteppedUnit], state: Mapping[Tensor, State], step: Step
    ) -> None:
        first = units[0].parameter
        super().__init__(units[0].shape, first.dtype, first.device, len(units))
        self.rule, self.units, self.step = rule, units, step
        names = [name for name in (*entry_names(rule), MASTER) if name in state[first]]
        self.states = [{k: local_of(state[unit.parameter][k]) for k in names} for unit in units]
        self.stacked = [name for name in names if name not in rule.elementwise_state]

    def take(self, part: slice) -> Stack:
        """Accumulate gradients and stack units. With a single unit, weight and state are views."""
        units, states = self.units[part], self.states[part]
        pairs = [*zip(units, states, strict=True)]
        weight = _stacked([unit.read(local_of(unit.parameter)) for unit in units])
        stacks = {k: _stacked([u.entry(k, state[k]) for u, state in pairs]) for k in self.stacked}
        weight = stacks.pop(MASTER, weight)
        grads = [unit.read(local_gradient(unit.parameter)) for unit in units]
        grad = torch.stack(grads).to(weight.dtype)  # a copy: rules may overwrite gradients
        names = self.rule.elementwise_state
        means = [{k: unit.entry(k, state[k]) for k in names} for unit, state in pairs]
        accumulate_(self.rule, [*grad], means, self.step.active)
        for (unit, state), mean in zip(pairs, means, strict=True):
            for key, value in mean.items():
                unit.write_entry(key, state[key], value)
        return Stack(weight, grad, stacks, self.step)

    def put(self, part: slice, stack: Stack, report: Report) -> None:
        """Copy an updated stack back to its units' parameters and states."""
        for i, (unit, state) in enumerate(zip(self.units[part], self.states[part], strict=True)):
            unit.write(local_of(unit.parameter), stack.weight[i])
            for key in self.stacked:
                new = stack.weight if key == MASTER else stack.state[key]
                unit.write_entry(key, state[key], new[i])


def _stacked(units: Sequence[Tensor]) -> Tensor:
    """Stack units into `[batch, ...]`. For a single contiguous unit, return a view."""
    if len(units) == 1 and units[0].is_contiguous():
        return units[0].unsqueeze(0)
    return torch.stack(list(units))
