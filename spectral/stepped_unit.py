"""One unit of a parameter that an optimizer steps: a matrix, or all that lies on this rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Self

import torch
from torch import Tensor

from .division import Box, Division, narrowed, sizes_of, span_of
from .local_part import local_of
from .rules.base import Rule


class Entry(NamedTuple):
    """Where a unit's part of an entry of the state lies, of one that belongs to units as a whole.

    Such an entry is kept flat, one unit after the other.
    """

    start: int
    shape: torch.Size

    @property
    def box(self) -> Box:
        """Where it lies in the entry."""
        return (span_of(self.start, self.shape.numel()),)

    def of(self, value: Tensor) -> Tensor:
        """Return the unit's part, a view."""
        if value.numel() == self.shape.numel():
            return value.view(self.shape)
        return value.view(-1).narrow(0, self.start, self.shape.numel()).view(self.shape)


@cache
def entry_shapes(rule: Rule, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Size]:
    """Return the shapes of the state of a unit that belong to it as a whole.

    The others have an element for each of the weight.
    """
    state = rule.init_state(torch.empty(1, *shape, dtype=dtype, device="meta"))
    elementwise = (
        rule.elementwise_state
        if rule.whole_matrix
        else [name for name, value in state.items() if value.shape == (1, *shape)]
    )
    return {name: value.shape[1:] for name, value in state.items() if name not in elementwise}


@dataclass(frozen=True)
class SteppedUnit:
    """A part of a parameter that is stepped as one: under an elementwise rule, all that lies here.

    division   of the parameter
    box        where the unit lies in the parameter
    shape      of the unit: `[rows, cols]` or `[n]`
    entries    of the state that belong to the unit as a whole
    """

    parameter: Tensor
    division: Division
    box: Box
    shape: torch.Size
    entries: Mapping[str, Entry]

    @classmethod
    def of(cls, parameter: Tensor, rule: Rule, division: Division) -> list[Self]:
        """Return the units of a parameter under `rule`."""
        whole = parameter.shape
        if not rule.whole_matrix:
            division, whole = Division(), local_of(parameter).shape
        units, starts = [], dict[str, int]()
        for box in division.boxes(whole):
            part = torch.empty(sizes_of(box), device="meta")
            shape = division.matrix(part).shape
            names = entry_shapes(rule, tuple(shape), parameter.dtype)
            entries = {name: Entry(starts.get(name, 0), entry) for name, entry in names.items()}
            for name, entry in names.items():
                starts[name] = starts.get(name, 0) + entry.numel()
            units.append(cls(parameter, division, box, shape, entries))
        return units

    @property
    def kind(self) -> tuple[object, ...]:
        """What units that are stacked have in common."""
        return self.shape, self.parameter.dtype, self.parameter.device

    def matrix(self, part: Tensor) -> Tensor:
        """Return the part of the parameter in `box` as the unit, a view where there is one."""
        return self.division.matrix(part)

    def part(self, unit: Tensor) -> Tensor:
        """Return the unit as the part of the parameter in `box`, a view where there is one."""
        return self.division.part(unit, sizes_of(self.box))

    def read(self, tensor: Tensor) -> Tensor:
        """Return the unit's part of a tensor like the parameter, a view where there is one."""
        return self.matrix(narrowed(tensor, self.box))

    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Copy the unit to its part of a tensor like the parameter, unless it lies there."""
        if value.data_ptr() != self.read(tensor).data_ptr():
            narrowed(tensor, self.box).copy_(self.part(value))

    def entry(self, name: str, value: Tensor) -> Tensor:
        """Return the unit's part of an entry of the state, a view where there is one."""
        return self.entries[name].of(value) if name in self.entries else self.read(value)

    def write_entry(self, name: str, entry: Tensor, value: Tensor) -> None:
        """Copy the unit's part of an entry of the state to it, unless it lies there."""
        if name not in self.entries:
            self.write(entry, value)
        elif (part := self.entries[name].of(entry)).data_ptr() != value.data_ptr():
            part.copy_(value)
