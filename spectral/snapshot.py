"""Parameters and states of an optimizer after a step, and values derived from them.

Before a step, a snapshot verifies that no parameter or state entry was replaced, cast or sharded
since the last full check. The check only compares object identities and a few attributes.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from .batching import grouped
from .division import Division, SteppedUnit
from .local_part import is_dtensor, local_of
from .parameter_state import MASTER, entry_names, listed_in, members_of, rule_of
from .rules import AdamWRule, Rule, State
from .rules.adamw import ENTRIES

Columns = dict[tuple[torch.dtype, torch.device], list[list[Tensor]]]
"""Lists of parameters, weights and each state entry, by dtype and device of the weights."""


class Snapshot:
    """Groups and states of an optimizer after a check.

    Attributes:
        parameters: parameters of all groups.
        sharded: whether any parameter is a DTensor.
        shapes: shapes of the parameters.
        forms: properties of the parameters on which states and owners depend.
        masters: (16-bit parameter, float32 master) pairs.
        columns: the tensors that are stepped in each AdamW group.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, State]) -> None:
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
        self._divisions = {member.parameter: member.division for member in members_of(groups)}
        self._units: dict[Tensor, tuple[Rule, list[SteppedUnit]]] = {}

    def _forms(self, groups: Sequence[Mapping[str, Any]]) -> tuple[list[torch.Size], list[object]]:
        kinds = [(g["rule"], Division.of(g["units"]), len(g["params"])) for g in groups]
        placements = (
            [p.placements for p in self.parameters if is_dtensor(p)] if self.sharded else []
        )
        types = [(p.dtype, p.device) for p in self.parameters]
        return [p.shape for p in self.parameters], [*kinds, *placements, *types]

    def holds(self, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, State]) -> bool:
        """Return whether the groups and states are still the same; no tensor is read."""
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
        """Return the units of a parameter; they do not depend on the rule's hyper-parameters."""
        cached = self._units.get(parameter)
        if cached is None or cached[0] is not rule:
            units = SteppedUnit.of(parameter, rule, self._divisions[parameter])
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
    """Return whether two lists contain the same objects in the same order (compared by `is`)."""
    return len(first) == len(second) and all(map(is_, first, second))
