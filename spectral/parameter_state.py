"""The state that an optimizer keeps of one parameter: its entries, how it begins and is followed.

Other programs keep entries in it as well. Only those of the rule, and the master, are looked at.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .division import Division, SteppedUnit
from .local_part import local_of, placed_like
from .rules.base import Rule, State

HALF = {torch.bfloat16, torch.float16}
MASTER = "master"
"""Entry of the state of a 16-bit parameter: its weight in float32."""


@cache
def entry_names(rule: Rule) -> tuple[str, ...]:
    """Return the names of the entries that a rule keeps of every parameter."""
    return tuple(rule.init_state(torch.empty(1, 2, 2, device="meta")))


def entry_shapes(parameter: Tensor, rule: Rule, division: Division) -> dict[str, torch.Size]:
    """Return the shape of every entry of the state, of a DTensor as a whole."""
    last = SteppedUnit.of(parameter, rule, division)[-1]
    shapes = dict.fromkeys((*entry_names(rule), MASTER), parameter.shape)
    for name, entry in last.entries.items():
        whole = torch.Size([entry.start + entry.shape.numel()])
        shapes[name] = whole if rule.whole_matrix else entry.shape
    return shapes


def complete_numbers(
    state: dict[str, Any], shapes: Mapping[str, torch.Size], device: torch.device
) -> dict[str, Any]:
    """Return a state with 0-d tensors in place of numbers, as which other programs save counts."""
    numbers = {
        name: torch.as_tensor(value, dtype=torch.float32, device=device).reshape(())
        for name, value in state.items()
        if shapes.get(name) == ()
        if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
        if not (isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 0)
    }
    return {**state, **numbers} if numbers else state


def entry_problems(
    state: Mapping[str, Any], shapes: Mapping[str, torch.Size], parameter: Tensor, name: str
) -> Iterator[str]:
    """Yield what is wrong with the entries that a rule needs of a parameter called `name`."""
    local = local_of(parameter).shape
    for key in (key for key in shapes if key in state):
        value, shape = state[key], tuple(shapes[key])
        if not isinstance(value, Tensor):
            yield f"{key} of {name} must be a tensor of shape {shape}, got {value!r}"
        elif value.shape != shapes[key]:
            yield f"{key} of {name} must have shape {shape}, got {tuple(value.shape)}"
        elif value.shape == parameter.shape and local_of(value).shape != local:
            part = tuple(local_of(value).shape)
            yield f"{key} of {name} must be sharded as it is, {tuple(local)} on a rank, got {part}"


def loaded(value: Any, parameter: Tensor, *, own: bool) -> Any:
    """Return an entry of a saved state for the state of a parameter.

    A tensor keeps its dtype. It is not copied if it has that of the parameter, as in torch.
    """
    if not isinstance(value, Tensor):
        return deepcopy(value)
    return value.detach().to(parameter.device, copy=own and value.dtype != parameter.dtype)


def follow(parameter: Tensor, state: State, rule: Rule, *, masters: bool) -> None:
    """Match a state to its parameter, which others may have written, cast or replaced."""
    half = parameter.dtype in HALF
    if half and MASTER in state:
        follow_weight(parameter, state[MASTER])
    else:
        state.pop(MASTER, None)
        least = torch.float32 if masters else parameter.dtype
        wide = torch.promote_types(parameter.dtype, least)
        for name in state.keys() & set(entry_names(rule)):
            value = state[name]
            # Counts stay in float32, as in torch's optimizers.
            if value.is_floating_point() and (name != "step" or value.dtype in HALF):
                state[name] = value.to(wide)
        if half and masters:
            state[MASTER] = parameter.detach().float()


def follow_weight(parameter: Tensor, master: Tensor) -> None:
    """Let a master take the value of its 16-bit parameter where that is no longer its rounding."""
    weight, master = local_of(parameter), local_of(master)
    rounded = master.to(weight.dtype)
    equal_bits = weight.is_cpu and torch.equal(rounded.view(torch.int16), weight.view(torch.int16))
    if not equal_bits:  # elsewhere the host would wait to know
        torch.where(rounded == weight, master, weight, out=master)


@torch.no_grad()
def initial_state(
    rule: Rule, division: Division, parameter: Tensor, weight_of: Callable[[Tensor], Tensor]
) -> State:
    """Create the state of a parameter that this rank steps alone, sharded as it is."""
    weight = weight_of(parameter)
    units = SteppedUnit.of(parameter, rule, division)
    states = [rule.init_state(unit.read(weight)[None]) for unit in units]
    initial = {}
    for name in states[0]:
        if name in units[0].entries:
            initial[name] = torch.cat([state[name].reshape(-1) for state in states])
            if not rule.whole_matrix:
                initial[name] = initial[name].view(units[0].entries[name].shape)
            continue
        value = torch.zeros_like(weight)
        for unit, state in zip(units, states, strict=True):
            unit.write(value, state[name][0])
        initial[name] = placed_like(value, parameter)
    return initial
