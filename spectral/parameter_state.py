"""Optimizer state of parameters: entries, initial values, checks and snapshots.

A parameter group defines the rule, the division into matrices and the names of its parameters.
Other programs may store entries in the state too; this module only uses the rule's entries and the
master.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields
from functools import cache, lru_cache
from itertools import chain, repeat
from numbers import Real
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .batching import grouped
from .device_values import are_finite
from .division import Division, SteppedUnit
from .local_part import is_dtensor, local_of, placed_like
from .rules import RULES, AdamWRule, Rule, State
from .rules.adamw import ENTRIES

HALF = {torch.bfloat16, torch.float16}
MASTER = "master"
"""State entry that holds the float32 master weight of a 16-bit parameter."""


@cache
def entry_names(rule: Rule) -> tuple[str, ...]:
    """Return the names of a rule's state entries."""
    return tuple(rule.init_state(torch.empty(1, 2, 2, device="meta")))


def complete_numbers(
    state: dict[str, Any], shapes: Mapping[str, torch.Size], device: torch.device
) -> dict[str, Any]:
    """Convert counts in a state to 0-d tensors. Other programs may have saved counts as numbers."""
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
    """Yield the errors in the rule's state entries for parameter `name`."""
    local = local_of(parameter).shape
    for key in (key for key in shapes if key in state):
        value, shape = state[key], tuple(shapes[key])
        if not isinstance(value, Tensor):
            yield f"{key} of {name} must be a tensor of shape {shape}, got {value!r}"
        elif value.shape != shapes[key]:
            yield f"{key} of {name} must have shape {shape}, got {tuple(value.shape)}"
        elif value.shape == parameter.shape and local_of(value).shape != local:
            part = tuple(local_of(value).shape)
            yield (
                f"{key} of {name} must be sharded like the parameter, with shape {tuple(local)} on "
                f"this rank, got {part}"
            )


def loaded(value: Any, parameter: Tensor, *, own: bool) -> Any:
    """Move a saved entry to its parameter's device. `own`: whether the rule uses the entry.

    Tensors keep their dtype. As in torch, tensors in the parameter's dtype are not copied.
    """
    if not isinstance(value, Tensor):
        return deepcopy(value)
    return value.detach().to(parameter.device, copy=own and value.dtype != parameter.dtype)


def follow(parameter: Tensor, state: State, rule: Rule, *, masters: bool) -> None:
    """Adapt a state to its parameter, which may have been modified, cast, moved or replaced."""
    half = parameter.dtype in HALF
    if not half:
        state.pop(MASTER, None)
    least = torch.float32 if masters or MASTER in state else parameter.dtype
    wide = torch.promote_types(parameter.dtype, least)
    for name in state.keys() & {*entry_names(rule), MASTER}:
        value = state[name]
        dtype = wide if value.is_floating_point() else value.dtype
        if name == "step":  # counters stay in float32, as in torch's optimizers
            dtype = torch.float32 if value.dtype in HALF else value.dtype
        state[name] = value.to(parameter.device, dtype)
    if MASTER in state:
        follow_weight(parameter, state[MASTER])
    elif half and masters:
        state[MASTER] = parameter.detach().float()


def follow_weight(parameter: Tensor, master: Tensor) -> None:
    """Update a master wherever it no longer rounds to the 16-bit parameter."""
    weight, master = local_of(parameter), local_of(master)
    rounded = master.to(weight.dtype)
    equal_bits = weight.is_cpu and torch.equal(rounded.view(torch.int16), weight.view(torch.int16))
    if not equal_bits:  # on other devices, checking would require a host sync
        torch.where(rounded == weight, master, weight, out=master)


@torch.no_grad()
def initial_state(rule: Rule, division: Division, parameter: Tensor, weight: Tensor) -> State:
    """Create the state of a parameter that this rank updates alone.

    Elementwise entries are sharded like the parameter. `weight` is this rank's part of the weight
    to update.
    """
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


NON_NEGATIVE = ("step", "variance", "square")
"""State entries that are counts or means of squares."""


class Member(NamedTuple):
    """A parameter in a group, with the rule and the division that determine its state.

    `rule_name` is the rule's key in `RULES`. `name` is "" if the group has no names.
    """

    parameter: Tensor
    rule_name: str
    rule: Rule
    division: Division
    name: str

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of every state entry (the global shape for DTensors)."""
        last = SteppedUnit.of(self.parameter, self.rule, self.division)[-1]
        shapes = dict.fromkeys((*entry_names(self.rule), MASTER), self.parameter.shape)
        for name, entry in last.entries.items():
            whole = torch.Size([entry.start + entry.shape.numel()])
            shapes[name] = whole if self.rule.whole_matrix else entry.shape
        return shapes


def members_of(groups: Iterable[Mapping[str, Any]]) -> Iterator[Member]:
    """Yield the parameters of groups, group by group."""
    for group in groups:
        rule, division = rule_of(group), Division.of(group["units"])
        names = chain(group.get("param_names", ()), repeat(""))
        for parameter, name in zip(group["params"], names, strict=False):
            yield Member(parameter, group["rule"], rule, division, name)


def listed_in(groups: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    """Return the items listed under `key` in all groups, group by group."""
    return [value for group in groups for value in group.get(key, ())]


def rule_of(group: Mapping[str, Any]) -> Rule:
    """Return the rule of a parameter group, with field values taken from the group.

    Raises ValueError or TypeError for a missing or invalid field.
    """
    kind = RULES[group["rule"]]
    names = _field_names(kind)
    try:
        values = [group[name] for name in names]
    except KeyError as error:
        raise ValueError(
            f"a group with rule {group['rule']!r} must contain the key {error.args[0]}; add groups "
            "with add_param_group"
        ) from None
    with suppress(TypeError):  # an unhashable value, for which the rule below raises an error
        return _rule(kind, *values)
    return kind(**dict(zip(names, values, strict=True)))


# Cached because the checks cost more than a step; typed because 1 == True.
@lru_cache(maxsize=256, typed=True)
def _rule(kind: type[Rule], *values: Any) -> Rule:
    return kind(**dict(zip(_field_names(kind), values, strict=True)))


@cache
def _field_names(kind: type[Rule]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def follow_names(groups: Sequence[dict[str, Any]], members: Mapping[Tensor, Member]) -> None:
    """Update the names in groups after another program has removed, added or moved parameters.

    Raises ValueError for a parameter that was never named.
    """
    for group in groups:
        params, names = group["params"], group.get("param_names")
        if names is None:
            continue
        known = [members[p].name if p in members else "" for p in params]
        pairs = zip(known, names, strict=False)
        moved = any(old != name and old in names for old, name in pairs)
        if len(names) == len(params) and not moved:
            continue  # the program may have renamed or replaced parameters
        for parameter, name in zip(params, known, strict=True):
            if not name:
                raise ValueError(
                    "every parameter in a group with param_names must have a name, got an "
                    f"unnamed parameter of shape {tuple(parameter.shape)}; use add_param_group"
                )
        group["param_names"] = known


def check_entries(members: Iterable[Member], state: Mapping[Any, Any]) -> None:
    """Raise ValueError for state entries that do not match their parameter.

    Numbers in the state are converted to 0-d tensors.
    """
    for i, member in enumerate(members):
        entries = state.get(member.parameter)
        if entries:
            name, shapes = member.name or f"parameter {i}", member.shapes
            numbers = complete_numbers(entries, shapes, local_of(member.parameter).device)
            for problem in entry_problems(numbers, shapes, member.parameter, name):
                raise ValueError(f"{problem}; was the parameter sharded without its state?")
            entries |= numbers


def saved_problems(groups: Sequence[Mapping[str, Any]], saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why a saved `state_dict` does not match the parameters in groups."""
    if not {"state", "param_groups"} <= saved.keys():
        yield f"a saved state must have the keys state and param_groups, got {[*saved]!r:.80}"
        return
    saved_groups = saved["param_groups"]
    for i, (group, other) in enumerate(zip(groups, saved_groups, strict=False)):
        rule, units = other.get("rule"), other.get("units", group["units"])
        if rule is None:
            yield (
                f"group {i} of the state must have rule {group['rule']!r}, got none: the state is "
                "from another program's optimizer"
            )
        elif rule != group["rule"] or Division.of(units) != Division.of(group["units"]):
            yield (
                f"group {i} of the state must have rule {group['rule']!r} and units "
                f"{group['units']}, got {rule!r} and {units}"
            )
    index = {name: i for i, name in enumerate(listed_in(groups, "param_names"))}
    for i, name in enumerate(listed_in(saved_groups, "param_names")):
        if index.get(name, i) != i:
            yield (
                f"parameter {i} of the state is {name}, but in this optimizer, parameter "
                f"{index[name]} is {name}"
            )
    keys = listed_in(saved_groups, "params")
    for member, key in zip(members_of(groups), keys, strict=False):
        entries = saved["state"].get(key, {})
        if not entries and entry_names(member.rule):
            yield f"parameter {key} of the state must have entries, got none"
        shapes = member.shapes
        numbers = complete_numbers(entries, shapes, local_of(member.parameter).device)
        yield from entry_problems(numbers, shapes, member.parameter, f"parameter {key}")
        for entry in (entry for entry in shapes if entry in numbers):
            if not are_finite([local_of(numbers[entry])]):
                yield f"{entry} of parameter {key} must be finite"
            elif entry in NON_NEGATIVE and bool((local_of(numbers[entry]) < 0).any()):
                yield f"{entry} of parameter {key} must not be negative"


def forget(state: dict[Any, Any], members: Iterable[Member]) -> None:
    """Remove the rule's state entries of members that are no longer in a group."""
    for member in members:
        entries = state.get(member.parameter, {})
        for name in (*entry_names(member.rule), MASTER):
            entries.pop(name, None)
        if not entries:
            state.pop(member.parameter, None)


Columns = dict[tuple[torch.dtype, torch.device], list[list[Tensor]]]
"""Lists of parameters, weights and each state entry, keyed by the weights' dtype and device."""


class Snapshot:
    """An optimizer's parameters and states after a step, and values derived from them.

    Before the next step, object identities and a few attributes are compared with the snapshot, to
    detect parameters and state entries that were replaced, cast or sharded since the last full
    check.

    Attributes:
        parameters: parameters of all groups.
        sharded: whether any parameter is a DTensor.
        shapes: shapes of the parameters.
        forms: parameter properties that determine states and owners: rules, divisions, placements,
            dtypes and devices.
        masters: (16-bit parameter, float32 master) pairs.
        columns: the tensors updated in each AdamW group.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[Tensor, State],
        members: Mapping[Tensor, Member],
    ) -> None:
        self.parameters: list[Tensor] = listed_in(groups, "params")
        self.sharded = any(map(is_dtensor, self.parameters))
        self.forms = self._forms(groups)
        self.shapes = self.forms[0]
        self._states = [state[p] for p in self.parameters]
        self._sizes = [*map(len, self._states)]
        self._names = [entry_names(rule_of(group)) for group in groups]
        self._entries = [
            (itemgetter(name), states, [entries[name] for entries in states])
            for name in {MASTER}.union(*self._names)
            for states in ([entries for entries in self._states if name in entries],)
        ]
        self.masters = [(p, state[p][MASTER]) for p in self.parameters if MASTER in state[p]]
        self.columns = [
            _columns(group["params"], state) if type(rule_of(group)) is AdamWRule else {}
            for group in groups
        ]
        self._members = members
        self._units: dict[Tensor, tuple[Rule, list[SteppedUnit]]] = {}

    def _forms(self, groups: Sequence[Mapping[str, Any]]) -> tuple[list[torch.Size], list[object]]:
        kinds = [(g["rule"], Division.of(g["units"]), len(g["params"])) for g in groups]
        placements = (
            [p.placements for p in self.parameters if is_dtensor(p)] if self.sharded else []
        )
        types = [(p.dtype, p.device) for p in self.parameters]
        return [p.shape for p in self.parameters], [*kinds, *placements, *types]

    def holds(self, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, State]) -> bool:
        """Return whether groups and states are still the same, without reading any tensor."""
        parameters = listed_in(groups, "params")
        with suppress(KeyError):  # an entry was removed
            return (
                same(parameters, self.parameters)
                and self._forms(groups) == self.forms
                and [entry_names(rule_of(group)) for group in groups] == self._names
                and same([state.get(p) for p in parameters], self._states)
                and [*map(len, self._states)] == self._sizes
                and all(same([*map(of, states)], was) for of, states, was in self._entries)
            )
        return False

    def units(self, parameter: Tensor, rule: Rule) -> list[SteppedUnit]:
        """Return a parameter's units, which do not depend on the rule's hyper-parameters."""
        cached = self._units.get(parameter)
        if cached is None or cached[0] is not rule:
            units = SteppedUnit.of(parameter, rule, self._members[parameter].division)
            cached = self._units[parameter] = rule, units
        return cached[1]


def _columns(parameters: Sequence[Tensor], state: Mapping[Tensor, State]) -> Columns:
    rows = [
        (p, state[p].get(MASTER, p), *(local_of(state[p][name]) for name in ENTRIES))
        for p in parameters
    ]
    kinds = grouped(rows, lambda row: (row[1].dtype, row[1].device))
    return {kind: [*map(list, zip(*members, strict=True))] for kind, members in kinds.items()}


def same(first: Sequence[object], second: Sequence[object]) -> bool:
    """Return whether two lists hold the same objects in the same order, compared by identity."""
    return len(first) == len(second) and all(map(is_, first, second))
