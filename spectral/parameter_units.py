"""Units of parameters that this rank steps alone."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .division import SteppedUnit
from .local_part import local_gradient, local_of
from .parameter_state import MASTER, entry_names
from .rules import Report, Rule, Stack, State, Step
from .stepping import Units, accumulate


def parameter_units(
    rule: Rule, units: list[SteppedUnit], state: Mapping[Tensor, State], step: Step
) -> Units:
    """Return units of one shape and step under one rule, which this rank steps alone.

    `state` is the optimizer's, by parameter. Gradients are accumulated in it.
    """
    first, names = units[0].parameter, rule.elementwise_state
    others = [k for k in (*entry_names(rule), MASTER) if k in state[first] and k not in names]

    def take(part: slice) -> Stack:
        """Stack weights, gradients, states and rates; of a single unit they are views."""
        members = units[part]
        weight = _stacked([unit.read(local_of(unit.parameter)) for unit in members])
        stacks = {
            k: _stacked([u.entry(k, local_of(state[u.parameter][k])) for u in members])
            for k in others
        }
        weight = stacks.pop(MASTER, weight)
        grads = [unit.read(local_gradient(unit.parameter)) for unit in members]
        grad = torch.stack(grads).to(weight.dtype)  # its own, for rules may overwrite gradients
        means = [{k: u.entry(k, local_of(state[u.parameter][k])) for k in names} for u in members]
        accumulate(rule, [*grad], means, step.active)
        for unit, mean in zip(members, means, strict=True):
            for key, value in mean.items():
                unit.write_entry(key, local_of(state[unit.parameter][key]), value)
        return Stack(weight, grad, stacks, step)

    def put(part: slice, stack: Stack, report: Report) -> None:
        """Copy a stack after its step to the parameters and states of its units."""
        for i, unit in enumerate(units[part]):
            unit.write(local_of(unit.parameter), stack.weight[i])
            for key in others:
                new = stack.weight if key == MASTER else stack.state[key]
                unit.write_entry(key, local_of(state[unit.parameter][key]), new[i])

    return Units(units[0].shape, first.dtype, first.device, len(units), take, put)


def _stacked(units: Sequence[Tensor]) -> Tensor:
    """Stack units to `[batch, ...]`; one that is contiguous is not copied."""
    if len(units) == 1 and units[0].is_contiguous():
        return units[0].unsqueeze(0)
    return torch.stack(list(units))
