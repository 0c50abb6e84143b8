"""How a parameter is divided into matrices.

A spectral rule steps one matrix `[rows, cols]` at a time, `rows` being outputs: one head's query, a
gate, one expert's down projection. Models keep several of them in one parameter, or transposed. A
division says, as data, where each matrix lies.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import prod
from numbers import Integral
from typing import Any, Self

from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: `(start, length)` on each of its axes."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """Where the matrices of a parameter lie.

    Attributes:
        rows: numbers of rows of successive matrices, a pattern that repeats along the outputs;
            empty if the parameter is one matrix (of each entry of a stack).
        transposed: the parameter is `[in, out]` and not `[out, in]`.
        stacked: the first axis counts matrices, as the experts of a layer.
    """

    rows: tuple[int, ...] = ()
    transposed: bool = False
    stacked: bool = False

    @classmethod
    def of(cls, value: Mapping[str, Any] | None) -> Self:
        """Read the `units` of a parameter group, None for one matrix a parameter.

        Raises TypeError for what is no mapping, ValueError for an unknown key or for rows that are
        no list of positive integers.
        """
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            raise TypeError(f"units must be a mapping such as {{'rows': [64]}}, got {value!r}")
        unknown = value.keys() - {"rows", "transposed", "stacked"}
        if unknown:
            raise ValueError(f"units has no key {', '.join(sorted(unknown))}")
        rows = value.get("rows", ())
        if not isinstance(rows, Sequence) or not all(
            type(n) is not bool and isinstance(n, Integral) and int(n) > 0 for n in rows
        ):
            raise ValueError(f"rows of units must be a list of positive integers, got {rows!r}")
        return cls(**{**value, "rows": tuple(map(int, rows))})

    def settings(self) -> dict[str, Any]:
        """Return what `of` reads, as plain values."""
        return asdict(self) | {"rows": list(self.rows)}

    def boxes(self, shape: Iterable[int]) -> list[Box]:
        """Return the part of a parameter of `shape` that each matrix occupies.

        Raises ValueError for a shape that cannot be divided like this.
        """
        shape = tuple(shape)
        if self == Division():
            return [tuple((0, n) for n in shape)]
        first = int(self.stacked)
        if len(shape) != first + 2:
            raise ValueError(
                f"units must divide parameters with {first + 2} dimensions, got shape {shape}"
            )
        axis = first + 1 if self.transposed else first
        pattern = self.rows or (shape[axis],)
        if shape[axis] % sum(pattern):
            raise ValueError(
                f"rows of units must divide the {shape[axis]} outputs of a parameter of shape "
                f"{shape}, got {pattern}"
            )
        rows = pattern * (shape[axis] // sum(pattern))
        bounds = [*zip(accumulate(rows, initial=0), rows, strict=False)]
        boxes = []
        for entry in range(shape[0]) if self.stacked else (0,):
            for bound in bounds:
                box = [(0, n) for n in shape]
                if self.stacked:
                    box[0] = (entry, 1)
                box[axis] = bound
                boxes.append(tuple(box))
        return boxes

    def matrix(self, part: Tensor) -> Tensor:
        """Return the part of a parameter that one matrix occupies as `[rows, cols]`.

        A view where there is one. A vector stays `[n]`, and a number becomes `[1]`; further axes
        are joined with the second.
        """
        if part.ndim == 0:
            return part.view(1)
        if self.stacked:
            part = part[0]
        if self.transposed:
            part = part.mT
        return part.flatten(1) if part.ndim > 2 else part

    def part(self, matrix: Tensor, shape: Iterable[int]) -> Tensor:
        """Return a matrix as the part of a parameter, of `shape`, that it occupies."""
        if self.transposed:
            matrix = matrix.mT
        return matrix.reshape(tuple(shape))


def narrowed(tensor: Tensor, box: Box) -> Tensor:
    """Return the part `box` of a tensor, a view."""
    for axis, (start, length) in enumerate(box):
        if length != tensor.shape[axis]:
            tensor = tensor.narrow(axis, start, length)
    return tensor


def intersection(a: Box, b: Box) -> Box | None:
    """Return what two parts of a tensor have in common, None if nothing."""
    overlap = []
    for (a_start, a_length), (b_start, b_length) in zip(a, b, strict=True):
        start, end = max(a_start, b_start), min(a_start + a_length, b_start + b_length)
        if end <= start:
            return None
        overlap.append((start, end - start))
    return tuple(overlap)


def relative(box: Box, outer: Box) -> Box:
    """Return `box` by its place within `outer`."""
    return tuple((s - o, n) for (s, n), (o, _) in zip(box, outer, strict=True))


def numel_of(box: Box) -> int:
    """Count the elements of a part."""
    return prod(length for _, length in box)
