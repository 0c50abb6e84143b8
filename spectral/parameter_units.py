"""Units of parameters that this rank steps alone."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .division import SteppedUnit
from .local_part import local_gradient, local_of
from .parameter_state import MASTER, entry_names
from .rules import Report, Rule, Stack, State, Step
from .stepping import Units, accumulate_


class ParameterUnits(Units):
    """Units of one shape, rule and step that this rank steps alone.

    `state` contains the optimizer's state of each parameter; `take` accumulates gradients in it.
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
        """Accumulate gradients and stack units; the weight and state of a single unit are views."""
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
        """Copy a stepped stack to the parameters and states of its units."""
        for i, (unit, state) in enumerate(zip(self.units[part], self.states[part], strict=True)):
            unit.write(local_of(unit.parameter), stack.weight[i])
            for key in self.stacked:
                new = stack.weight if key == MASTER else stack.state[key]
                unit.write_entry(key, state[key], new[i])


def _stacked(units: Sequence[Tensor]) -> Tensor:
    """Stack units to `[batch, ...]`; a single contiguous unit is not copied."""
    if len(units) == 1 and units[0].is_contiguous():
        return units[0].unsqueeze(0)
    return torch.stack(list(units))
