"""Parameter groups: the rule, division and name of their parameters, and checks of their states."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .device_values import are_finite
from .division import Division
from .local_part import local_of
from .parameter_state import MASTER, complete_numbers, entry_names, entry_problems, entry_shapes
from .rules import RULES, Rule

NON_NEGATIVE = ("step", "variance", "square")
"""Entries that are counts, or means of squares."""
Kind = tuple[str, Division]
"""Rule and division of a parameter, of which its state is."""


class Member(NamedTuple):
    """A parameter of a group."""

    parameter: Tensor
    rule: Rule
    division: Division
    name: str

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of every entry of its state."""
        return entry_shapes(self.parameter, self.rule, self.division)


def members_of(groups: Iterable[Mapping[str, Any]]) -> Iterator[Member]:
    """Yield the parameters of groups, one group after the other."""
    for group in groups:
        rule, division = rule_of(group), Division.of(group["units"])
        names = group.get("param_names")
        for i, parameter in enumerate(group["params"]):
            name = names[i] if names else f"parameter {i}"
            yield Member(parameter, rule, division, name)


def listed_in(groups: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    """Return what groups list under a key, one group after the other."""
    return [value for group in groups for value in group.get(key, ())]


def rule_of(group: Mapping[str, Any]) -> Rule:
    """Return the rule of a parameter group with the fields that the group contains.

    Raises ValueError or TypeError for a field that is missing or makes no sense.
    """
    kind = RULES[group["rule"]]
    names = _field_names(kind)
    try:
        values = [group[name] for name in names]
    except KeyError as error:
        raise ValueError(
            f"a group of rule {group['rule']!r} must have {error.args[0]}; call add_param_group"
        ) from None
    with suppress(TypeError):  # of a value that cannot be hashed; the rule itself says what it is
        return _rule(kind, *values)
    return kind(**dict(zip(names, values, strict=True)))


@lru_cache(maxsize=256, typed=True)  # True is no valid 1, and the checks take longer than a step
def _rule(kind: type[Rule], *values: Any) -> Rule:
    return kind(**dict(zip(_field_names(kind), values, strict=True)))


@cache
def _field_names(kind: type[Rule]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def kinds_of(groups: Iterable[Mapping[str, Any]]) -> dict[Tensor, Kind]:
    """Return rule and division of every parameter."""
    return {
        parameter: (group["rule"], division)
        for group in groups
        for division in (Division.of(group.get("units")),)
        for parameter in group["params"]
    }


def check_kinds(
    kinds: Mapping[Tensor, Kind], before: Mapping[Tensor, Kind], state: Mapping[Any, Any]
) -> None:
    """Raise ValueError for a parameter whose state is of another rule or other units."""
    for parameter, kind in kinds.items():
        old = before.get(parameter, kind)
        if kind != old and state.get(parameter):
            raise ValueError(
                f"rule and units of a parameter must stay {old[0]!r} and {old[1].settings()}, of "
                f"which its state is, got {kind[0]!r} and {kind[1].settings()}; make an optimizer "
                "or a group for it"
            )


def check_entries(groups: Iterable[Mapping[str, Any]], state: Mapping[Any, Any]) -> None:
    """Raise ValueError for entries of the state that do not fit their parameter.

    Numbers become 0-d tensors.
    """
    for member in members_of(groups):
        entries = state.get(member.parameter)
        if entries:
            numbers = complete_numbers(entries, member.shapes, local_of(member.parameter).device)
            for problem in entry_problems(numbers, member.shapes, member.parameter, member.name):
                raise ValueError(f"{problem}; was the parameter cut without its state?")
            entries |= numbers


def saved_problem(
    groups: Iterable[Mapping[str, Any]], saved: Mapping[Any, Any], keys: Iterable[Any]
) -> str | None:
    """Return what is wrong with a saved state of the parameters of groups, None if nothing is.

    `keys` are those of the parameters in the state.
    """
    for member, key in zip(members_of(groups), keys, strict=False):
        parameter, shapes, name = member.parameter, member.shapes, f"parameter {key}"
        own = complete_numbers(saved.get(key, {}), shapes, local_of(parameter).device)
        for problem in entry_problems(own, shapes, parameter, name):
            return problem
        for entry in (entry for entry in shapes if entry in own):
            if not are_finite([local_of(own[entry])]):
                return f"{entry} of {name} must be finite"
            if entry in NON_NEGATIVE and bool((local_of(own[entry]) < 0).any()):
                return f"{entry} of {name} must not be negative"
    return None


def forget(state: dict[Any, Any], kinds: Mapping[Tensor, Kind]) -> None:
    """Remove the own entries of the states of parameters, of these kinds, that are in no group."""
    for parameter, (rule, _) in kinds.items():
        entries = state.get(parameter, {})
        for name in (*entry_names(RULES[rule]()), MASTER):
            entries.pop(name, None)
        if not entries:
            state.pop(parameter, None)
