"""How a parameter is divided into matrices.

A spectral rule steps one matrix `[rows, cols]` at a time, `rows` being outputs: one head's query, a
gate, one expert's down projection. Models keep several of them in one parameter, or transposed. A
division says, as data, where each matrix lies.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise, product
from math import prod
from numbers import Integral
from typing import Any, Self

import torch
from torch import Tensor

Box = tuple[range, ...]
"""A part of a tensor: a range of places on each of its axes, whose step may exceed 1."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """Where the matrices of a parameter lie.

    Attributes:
        rows: numbers of rows of successive matrices, a pattern that repeats along the outputs;
            empty if the parameter is one matrix (of each entry of a stack, group and stride).
        transposed: the parameter is `[in, out]` and not `[out, in]`. With more axes, which are
            those of a transposed convolution, the matrix is `[out, in * ...]`.
        stacked: the first axis counts matrices, as the experts of a layer.
        stride: matrix j contains the outputs j, j + stride, ..., as an interleaved gate and up do;
            `rows` divides these outputs.
        groups: number of consecutive parts of the parameter's first axis (after that of a stack)
            that contain matrices of their own, as the groups of a transposed convolution.
    """

    rows: tuple[int, ...] = ()
    transposed: bool = False
    stacked: bool = False
    stride: int = 1
    groups: int = 1

    @classmethod
    def of(cls, value: Mapping[str, Any] | None) -> Self:
        """Read the `units` of a parameter group, None for one matrix a parameter.

        Raises:
            TypeError: what is no mapping.
            ValueError: an unknown key; rows that are no list of positive integers; a stride or
                groups that are no positive integer; transposed or stacked that are no truth value.
        """
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise TypeError(f"units must be a mapping such as {{'rows': [64]}}, got {value!r}")
        unknown = value.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise ValueError(f"units has no key {', '.join(sorted(unknown))}")
        rows = value.get("rows", ())
        if not isinstance(rows, Sequence) or not all(map(_is_count, rows)):
            raise ValueError(f"rows of units must be a list of positive integers, got {rows!r}")
        counts = {key: value[key] for key in ("stride", "groups") if key in value}
        for key, count in counts.items():
            if not _is_count(count):
                raise ValueError(f"{key} of units must be a positive integer, got {count!r}")
            counts[key] = int(count)
        for key in ("transposed", "stacked"):
            if not isinstance(value.get(key, False), bool):
                raise ValueError(f"{key} of units must be True or False, got {value[key]!r}")
        return cls(**{**value, **counts, "rows": tuple(map(int, rows))})

    def settings(self) -> dict[str, Any]:
        """Return what `of` reads, as plain values."""
        return asdict(self) | {"rows": list(self.rows)}

    def boxes(self, shape: Iterable[int]) -> list[Box]:
        """Return the part of a parameter of `shape` that each matrix occupies.

        Raises ValueError for a shape that cannot be divided like this.
        """
        shape = tuple(shape)
        if self == Division():
            return [tuple(map(range, shape))]
        first = int(self.stacked)
        if len(shape) < first + 2:
            raise ValueError(
                f"units must divide parameters with {first + 2} dimensions or more, got shape "
                f"{shape}"
            )
        if shape[first] % self.groups:
            raise ValueError(
                f"groups of units must divide axis {first} of a parameter of shape {shape}, got "
                f"{self.groups}"
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
        """Return the shape of each matrix of a parameter of `shape`; raises as `boxes` does."""
        parts = (torch.empty(sizes_of(box), device="meta") for box in self.boxes(shape))
        return [tuple(self.matrix(part).shape) for part in parts]

    def _matrices(self, outputs: range, shape: tuple[int, ...]) -> list[range]:
        """Return the outputs of each matrix."""
        pattern = self.rows or (len(outputs) // self.stride,)
        if not all(pattern) or len(outputs) % (sum(pattern) * self.stride):
            stride = f" at a stride of {self.stride}" if self.stride > 1 else ""
            raise ValueError(
                f"rows of units must divide the {len(outputs)} outputs of a parameter of shape "
                f"{shape}, got {pattern}{stride}"
            )
        repeats = len(outputs) // self.stride // sum(pattern)
        bounds = [*pairwise(accumulate(pattern * repeats, initial=0))]
        strided = [outputs[offset :: self.stride] for offset in range(self.stride)]
        return [every[start:stop] for every in strided for start, stop in bounds]

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
            part = part.transpose(0, 1)
        return part.flatten(1) if part.ndim > 2 else part

    def part(self, matrix: Tensor, shape: Iterable[int]) -> Tensor:
        """Return a matrix as the part of a parameter, of `shape`, that it occupies."""
        shape = tuple(shape)
        if self.transposed:
            inputs, outputs, *rest = shape[int(self.stacked) :]
            matrix = matrix.reshape(outputs, inputs, *rest).transpose(0, 1)
        return matrix.reshape(shape)


def _is_count(value: Any) -> bool:
    return type(value) is not bool and isinstance(value, Integral) and int(value) > 0


def narrowed(tensor: Tensor, box: Box) -> Tensor:
    """Return the part `box` of a tensor, a view."""
    for axis, places in enumerate(box):
        if len(places) != tensor.shape[axis]:
            if places.step == 1:
                tensor = tensor.narrow(axis, places.start, len(places))
            else:
                every = slice(places.start, places.stop, places.step)
                tensor = tensor[(*[slice(None)] * axis, every)]
    return tensor


def span_of(start: int, length: int) -> range:
    """Return the consecutive places from `start` on."""
    return range(start, start + length)


def sizes_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a part."""
    return tuple(map(len, box))


def numel_of(box: Box) -> int:
    """Count the elements of a part."""
    return prod(map(len, box))


def intersection(box: Box, contiguous: Box) -> Box | None:
    """Return what a part of a tensor has in common with one of step 1, None if nothing."""
    common = tuple(
        places[bisect_left(places, whole.start) : bisect_left(places, whole.stop)]
        for places, whole in zip(box, contiguous, strict=True)
    )
    return common if all(common) else None


def relative(box: Box, outer: Box) -> Box:
    """Return `box` by its place within `outer`, whose step each of its own is a multiple of."""
    return tuple(_relative(*pair) for pair in zip(box, outer, strict=True))


def _relative(places: range, outer: range) -> range:
    start, step = (places.start - outer.start) // outer.step, places.step // outer.step
    return range(start, start + step * len(places), step)
