"""Numbers that accompany the elements of tensors through their views.

A shadow belongs to a storage, which views share, so views of a tensor need no work. Along most axes
of an activation its numbers do not change (the batch, the tokens), so a shadow has length 1 there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

NONE = -1.0
"""The number of an element that has none. Numbers are float64, which every operation moves."""


class Layout(NamedTuple):
    """Where the elements of a tensor lie in its storage; a complex number is two elements."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        """Return the layout of a tensor."""
        if tensor.is_complex():
            strides = *(2 * stride for stride in tensor.stride()), 1
            return cls(2 * int(tensor.storage_offset()), (*tensor.shape, 2), strides)
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


class Shadow(NamedTuple):
    """The numbers of a storage: `values`, which broadcast to a tensor of some layout there.

    Without values, an element's number is `start` and its distance from the layout's offset.
    """

    layout: Layout
    values: Tensor | None = None
    start: int = 0

    def read(self, tensor: Tensor) -> Tensor:
        """Return the numbers of a view of the storage, of length 1 on axes without change."""
        view = Layout.of(tensor)
        if self.values is not None and view == self.layout:
            return self.values
        ndim, device = len(view.sizes), tensor.device
        place = torch.full([1] * ndim, view.offset - self.layout.offset, device=device)
        for axis, (size, stride) in enumerate(zip(*view[1:], strict=True)):
            if size > 1 and not self._is_constant(view, axis):
                steps = torch.arange(size, device=device) * stride
                place = place + steps.view(-1, *[1] * (ndim - 1 - axis))
        if self.values is None:
            return (place + self.start).double()
        indices: list[Tensor | int] = [0] * self.values.ndim
        for axis in self._moving():
            indices[axis] = place // self.layout.strides[axis] % self.layout.sizes[axis]
        return condensed(self.values[tuple(indices)].expand(place.shape))

    def _moving(self) -> list[int]:
        """Return the axes of the layout along which numbers change."""
        return [] if self.values is None else [a for a, n in enumerate(self.values.shape) if n > 1]

    def _is_constant(self, view: Layout, axis: int) -> bool:
        """Whether no number changes along an axis of a view."""
        step, start = view.strides[axis], view.offset - self.layout.offset
        if self.values is None:
            return step == 0
        for a in self._moving():
            stride, size = self.layout.strides[a], self.layout.sizes[a]
            below = sum((n - 1) * s for n, s in zip(*view[1:], strict=True) if s < stride)
            within = step < stride and start % stride + below < stride
            if step % (stride * size) and not within:
                return False
        return True


class Shadows:
    """The shadows of the storages that have one."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[Any, Shadow] = WeakKeyDictionary()

    def __contains__(self, tensor: Tensor) -> bool:
        """Whether the storage of a tensor has a shadow."""
        return tensor.untyped_storage() in self.of

    def __getitem__(self, tensor: Tensor) -> Shadow:
        """Return the shadow of the storage of a tensor."""
        return self.of[tensor.untyped_storage()]

    def number(self, tensor: Tensor, start: int) -> int:
        """Number the elements of a tensor as they lie in memory, and count them."""
        layout = Layout.of(tensor)
        self.of[tensor.untyped_storage()] = Shadow(layout, start=start)
        return sum((n - 1) * s for n, s in zip(*layout[1:], strict=True)) + 1

    def read(self, tensor: Tensor) -> Tensor | None:
        """Return the number at each place of a tensor, None if it has none.

        Its length is 1 on axes along which numbers do not change.
        """
        shadow = self.of.get(tensor.untyped_storage())
        numbers = shadow.read(tensor) if shadow else None
        return None if numbers is None or bool((numbers < 0).all()) else numbers

    def write(self, tensor: Tensor, numbers: Tensor) -> None:
        """Put numbers, which broadcast to the tensor, into its storage."""
        storage, view = tensor.untyped_storage(), Layout.of(tensor)
        size = storage.nbytes() // tensor.element_size() * (1 + tensor.is_complex())
        numbers = numbers.view(*[1] * (len(view.sizes) - numbers.ndim), *numbers.shape)
        if prod(view.sizes) < size:  # a part of it: the others stay
            whole = numbers.new_full((size,), NONE)
            if storage in self.of:
                whole.copy_(self.of[storage].read(tensor.as_strided((size,), (1,), 0)))
            whole.as_strided(view.sizes, view.strides, view.offset).copy_(numbers)
            numbers, view = whole, Layout(0, (size,), (1,))
        self.of[storage] = Shadow(view, numbers)

    def copy(self, copy: Tensor, source: Tensor) -> None:
        """Give each element of a copy the number of the element at its place."""
        if copy.stride() == source.stride():
            layout = self[source].layout
            moved = layout.offset + copy.storage_offset() - source.storage_offset()
            shadow = self[source]._replace(layout=layout._replace(offset=int(moved)))
            self.of[copy.untyped_storage()] = shadow
        else:
            self.write(copy, self[source].read(source))


def condensed(numbers: Tensor) -> Tensor:
    """Return one place of every axis along which no number changes; padding has none."""
    for axis in range(numbers.ndim if numbers.numel() > 1 else 0):
        if numbers.shape[axis] > 1:
            last = numbers.amax(axis, keepdim=True)
            if bool(((numbers == last) | (numbers < 0)).all()):
                numbers = last
    return numbers


def sorted_numbers(numbers: Tensor) -> list[int]:
    """Return the numbers that occur."""
    return sorted({int(n) for n in numbers.flatten().tolist() if n >= 0})


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, mappings and records."""
    if isinstance(values, Tensor):
        yield values
        return
    if not isinstance(values, (list, tuple, Mapping)):
        values = vars(values) if is_dataclass(values) and not isinstance(values, type) else ()
    for value in values.values() if isinstance(values, Mapping) else values:
        yield from tensors_in(value)
