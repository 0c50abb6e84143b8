"""The division of a parameter into matrices, and the units that an optimizer updates.

A spectral rule updates one matrix `[rows, cols]` at a time, such as a head's query projection, a
gate or an expert's down projection. Rows are outputs. A parameter may hold several matrices or be
transposed. A division describes where each matrix is located.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate, pairwise, product
from math import prod
from numbers import Integral
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from .local_part import local_of
from .rules.base import Rule

Box = tuple[range, ...]
"""A part of a tensor: one index range per axis, with a step that may exceed 1."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """Locations of the matrices in a parameter.

    Attributes:
        rows: row counts of consecutive matrices, a pattern that repeats along the outputs. If
            empty, the parameter is a single matrix, or one matrix for each combination of stack
            entry, group and stride offset.
        transposed: whether the parameter is `[in, out]` instead of `[out, in]`. With more than two
            axes (a transposed convolution), the matrix is `[out, in * ...]`.
        stacked: whether the first axis enumerates matrices, such as the experts in a layer.
        stride: number of interleaved matrices, such as gate and up: matrix j consists of outputs
            j, j + stride, ...; each interleaved matrix is further split by `rows`.
        groups: number of equal parts of the first axis (of the second axis if stacked). Each part
            is a separate matrix, such as a group of a transposed convolution.
    """

    rows: tuple[int, ...] = ()
    transposed: bool = False
    stacked: bool = False
    stride: int = 1
    groups: int = 1

    @classmethod
    def of(cls, value: Mapping[str, Any] | None) -> Self:
        """Parse a parameter group's `units`. None means one matrix per parameter.

        Raises:
            TypeError: if `units` is not a mapping.
            ValueError: if a key is unknown, `rows` is not a list of positive integers, `stride` or
                `groups` is not a positive integer, or `transposed` or `stacked` is not a bool.
        """
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise TypeError(f"units must be a mapping such as {{'rows': [64]}}, got {value!r}")
        if unknown := value.keys() - cls.__dataclass_fields__.keys():
            keys = ", ".join(cls.__dataclass_fields__)
            names = ", ".join(sorted(unknown))
            raise ValueError(f"keys of units must be among {keys}, got {names}")
        rows = value.get("rows", ())
        if not isinstance(rows, Sequence) or not all(map(_is_count, rows)):
            raise ValueError(f"units['rows'] must be a list of positive integers, got {rows!r}")
        for key, given in value.items():
            flag = key in ("transposed", "stacked")
            if key != "rows" and not (isinstance(given, bool) if flag else _is_count(given)):
                wanted = "True or False" if flag else "a positive integer"
                raise ValueError(f"units[{key!r}] must be {wanted}, got {given!r}")
        counts = {key: int(value[key]) for key in ("stride", "groups") if key in value}
        return cls(**{**value, **counts, "rows": tuple(map(int, rows))})

    def settings(self) -> dict[str, Any]:
        """Return the division as a mapping of plain values, in the format that `of` parses."""
        return asdict(self) | {"rows": list(self.rows)}

    def boxes(self, shape: Iterable[int]) -> list[Box]:
        """Return the box of each matrix in a parameter of `shape`.

        Raises ValueError if the division does not fit `shape`.
        """
        shape = tuple(shape)
        if self == Division():
            return [tuple(map(range, shape))]
        first = int(self.stacked)
        if len(shape) < first + 2:
            raise ValueError(
                f"a parameter with these units must have at least {first + 2} dimensions, got "
                f"shape {shape}"
            )
        if shape[first] % self.groups:
            raise ValueError(
                f"units['groups'] must divide the size of axis {first} of a parameter of shape "
                f"{shape}, got {self.groups}"
            )
        size = shape[first] // self.groups
        axes = [[range(n)] for n in shape]
        if self.stacked:
            axes[0] = [span_of(i, 1) for i in range(shape[0])]
        axes[first] = [span_of(i * size, size) for i in range(self.groups)]
        outputs = first + int(self.transposed)
        axes[outputs] = [part for whole in axes[outputs] for part in self._matrices(whole, shape)]
        return [*product(*axes)]

    def shapes(self, shape: Iterable[int]) -> list[tuple[int, ...]]:
        """Return the shape of each matrix in a parameter of `shape`. Raises as `boxes` does."""
        parts = (torch.empty(sizes_of(box), device="meta") for box in self.boxes(shape))
        return [tuple(self.matrix(part).shape) for part in parts]

    def _matrices(self, outputs: range, shape: tuple[int, ...]) -> list[range]:
        """Return the output range of each matrix."""
        pattern = self.rows or (len(outputs) // self.stride,)
        if not all(pattern) or len(outputs) % (sum(pattern) * self.stride):
            raise ValueError(
                "the sum of units['rows'] times units['stride'] must divide the "
                f"{len(outputs)} outputs of a parameter of shape {shape}, got {pattern} with "
                f"stride {self.stride}"
            )
        repeats = len(outputs) // self.stride // sum(pattern)
        bounds = [*pairwise(accumulate(pattern * repeats, initial=0))]
        strided = [outputs[offset :: self.stride] for offset in range(self.stride)]
        return [every[start:stop] for every in strided for start, stop in bounds]

    def matrix(self, part: Tensor) -> Tensor:
        """Reshape one matrix's part of a parameter to `[rows, cols]`, as a view if possible.

        Vectors stay `[n]`, scalars become `[1]`, and trailing axes are flattened into the second
        axis.
        """
        if part.ndim == 0:
            return part.view(1)
        if self.stacked:
            part = part[0]
        if self.transposed:
            part = part.transpose(0, 1)
        return part.flatten(1) if part.ndim > 2 else part

    def part(self, matrix: Tensor, shape: Iterable[int]) -> Tensor:
        """Reshape a matrix back to `shape`, the shape of the matrix's part of a parameter."""
        shape = tuple(shape)
        if self.transposed:
            inputs, outputs, *rest = shape[int(self.stacked) :]
            matrix = matrix.reshape(outputs, inputs, *rest).transpose(0, 1)
        return matrix.reshape(shape)


def _is_count(value: Any) -> bool:
    return type(value) is not bool and isinstance(value, Integral) and int(value) > 0


def narrowed(tensor: Tensor, box: Box) -> Tensor:
    """Return a view of a tensor's elements in `box`."""
    return tensor[tuple(slice(p.start, p.stop, p.step) for p in box)]


def span_of(start: int, length: int) -> range:
    """Return the range of `length` consecutive indices starting at `start`."""
    return range(start, start + length)


def sizes_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(map(len, box))


def numel_of(box: Box) -> int:
    """Return the number of elements in a box."""
    return prod(map(len, box))


def intersection(box: Box, contiguous: Box) -> Box | None:
    """Return the intersection of a box and a box of step 1, or None if they do not overlap."""
    common = tuple(
        indices[bisect_left(indices, whole.start) : bisect_left(indices, whole.stop)]
        for indices, whole in zip(box, contiguous, strict=True)
    )
    return common if all(common) else None


def relative(box: Box, outer: Box) -> Box:
    """Return `box` relative to `outer`. The steps of `outer` must divide the steps of `box`."""

    def within(indices: range, whole: range) -> range:
        start, step = (indices.start - whole.start) // whole.step, indices.step // whole.step
        return range(start, start + step * len(indices), step)

    return tuple(map(within, box, outer))


class Entry(NamedTuple):
    """Location of a unit's values in a state entry that is stored per unit, not per element.

    The entry is a flat tensor that concatenates the values of consecutive units.
    """

    start: int
    shape: torch.Size

    @property
    def box(self) -> Box:
        """The box of indices at which the flat entry stores the unit's values."""
        return (span_of(self.start, self.shape.numel()),)

    def of(self, value: Tensor) -> Tensor:
        """Return a view of the unit's values in the entry `value`."""
        if value.numel() == self.shape.numel():
            return value.view(self.shape)
        return value.view(-1).narrow(0, self.start, self.shape.numel()).view(self.shape)


@cache
def entry_shapes(rule: Rule, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Size]:
    """Return the shapes of the state entries that are stored per unit, not per element.

    All other entries have the same shape as the weight.
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
    """A unit: the part of a parameter that a rule updates as a whole.

    For whole-matrix rules, the unit is one matrix; for elementwise rules, the unit is this rank's
    entire part of the parameter.

    division   how the parameter is divided into matrices
    box        the unit's box in the parameter
    shape      shape of the unit: `[rows, cols]` or `[n]`
    entries    the unit's locations in the state entries that are stored per unit
    """

    parameter: Tensor
    division: Division
    box: Box
    shape: torch.Size
    entries: Mapping[str, Entry]

    @classmethod
    def of(cls, parameter: Tensor, rule: Rule, division: Division) -> list[Self]:
        """Return the units of a parameter that is updated by `rule`."""
        whole = parameter.shape
        if not rule.whole_matrix:
            division, whole = Division(), local_of(parameter).shape
        units, ends = [], Counter[str]()
        for box, shape in zip(division.boxes(whole), division.shapes(whole), strict=True):
            names = entry_shapes(rule, shape, parameter.dtype)
            entries = {name: Entry(ends[name], entry) for name, entry in names.items()}
            ends.update({name: entry.numel() for name, entry in names.items()})
            units.append(cls(parameter, division, box, torch.Size(shape), entries))
        return units

    @property
    def kind(self) -> tuple[object, ...]:
        """Properties shared by all units in a stack."""
        return self.shape, self.parameter.dtype, self.parameter.device

    def matrix(self, part: Tensor) -> Tensor:
        """Reshape the part of the parameter in `box` to the unit's shape, as a view if possible."""
        return self.division.matrix(part)

    def part(self, unit: Tensor) -> Tensor:
        """Reshape the unit to the shape of its part of the parameter, as a view if possible."""
        return self.division.part(unit, sizes_of(self.box))

    def read(self, tensor: Tensor) -> Tensor:
        """Return the unit's part of a tensor shaped like the parameter, as a view if possible."""
        return self.matrix(narrowed(tensor, self.box))

    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Copy the unit to its part of a tensor shaped like the parameter.

        No-op if the unit is already a view of that part.
        """
        if value.data_ptr() != self.read(tensor).data_ptr():
            narrowed(tensor, self.box).copy_(self.part(value))

    def entry(self, name: str, value: Tensor) -> Tensor:
        """Return the unit's part of a state entry, as a view if possible."""
        return self.entries[name].of(value) if name in self.entries else self.read(value)

    def write_entry(self, name: str, entry: Tensor, value: Tensor) -> None:
        """Copy the unit's part into a state entry.

        No-op if the part is already a view of the entry.
        """
        if name not in self.entries:
            self.write(entry, value)
        elif (part := self.entries[name].of(entry)).data_ptr() != value.data_ptr():
            part.copy_(value)
