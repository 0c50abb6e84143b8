"""Shadows of tensors: one number for each element of a tensor.

A shadow belongs to a storage, so it is shared by all views of a tensor. A shadow has length 1 along
axes where numbers do not change, such as the batch and token axes of an activation.
"""

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

NONE = -1.0
"""Marks an element without a number. Numbers are float64, which every operation supports."""


class Layout(NamedTuple):
    """Positions of a tensor's elements in its storage. Complex numbers count as two elements."""

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
    """The numbers of the elements in a storage: `values`, broadcast to a tensor of `layout`.

    If `values` is None, an element's number is `start` plus the element's distance from the
    layout's offset.
    """

    layout: Layout
    values: Tensor | None = None
    start: int = 0

    def read(self, tensor: Tensor) -> Tensor:
        """Return the numbers for a view of the storage, with length 1 along constant axes."""
        view = Layout.of(tensor)
        if self.values is None:
            return (_distances(self.layout, (), view) + self.start).double().to(tensor.device)
        if view == self.layout:
            return self.values
        sizes = tuple(self.values.shape)
        return condensed(self.values.flatten()[_distances(self.layout, sizes, view)])


@lru_cache(256)  # layers repeat within a model
def _distances(layout: Layout, moving: tuple[int, ...], view: Layout) -> Tensor:
    """Return the distances of a view's elements from a layout's offset, `[1 or n, ...]`.

    Distances count elements of the storage. If `moving` is the shape of values that broadcast to
    the layout, distances count elements of these values instead. The length is 1 along axes where
    no distance changes.
    """
    axes = [axis for axis, size in enumerate(moving) if size > 1]
    start = view.offset - layout.offset
    distance = torch.full([1] * len(view.sizes), start)
    for axis, (size, step) in enumerate(zip(*view[1:], strict=True)):
        constant = (
            not step
            if not moving
            else all(
                step % (layout.strides[a] * layout.sizes[a]) == 0
                or (step < layout.strides[a] and _within(layout.strides[a], start, view))
                for a in axes
            )
        )
        if size > 1 and not constant:
            steps = torch.arange(size) * step
            distance = distance + steps.view(-1, *[1] * (len(view.sizes) - 1 - axis))
    if not moving:
        return distance
    among = torch.zeros_like(distance)
    for a in axes:
        among += distance // layout.strides[a] % layout.sizes[a] * prod(moving[a + 1 :])
    return among


def _within(stride: int, start: int, view: Layout) -> bool:
    """Return whether a view's axes with strides below `stride` span less than `stride`."""
    below = sum((n - 1) * s for n, s in zip(*view[1:], strict=True) if s < stride)
    return start % stride + below < stride


class Shadows:
    """Maps storages to shadows."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[Any, Shadow] = WeakKeyDictionary()

    def __contains__(self, tensor: Tensor) -> bool:
        """Return whether a tensor's storage has a shadow."""
        return tensor.untyped_storage() in self.of

    def __getitem__(self, tensor: Tensor) -> Shadow:
        """Return the shadow of a tensor's storage."""
        return self.of[tensor.untyped_storage()]

    def number(self, tensor: Tensor, start: int) -> int:
        """Number a tensor's elements from `start` in memory order, and return their count."""
        layout = Layout.of(tensor)
        self.of[tensor.untyped_storage()] = Shadow(layout, start=start)
        return sum((n - 1) * s for n, s in zip(*layout[1:], strict=True)) + 1

    def read(self, tensor: Tensor) -> Tensor | None:
        """Return the number of each element of a tensor, or None if the tensor has no shadow.

        The result has length 1 along axes where the numbers do not change.
        """
        shadow = self.of.get(tensor.untyped_storage())
        numbers = shadow.read(tensor) if shadow else None
        return None if numbers is None or bool((numbers < 0).all()) else numbers

    def write(self, tensor: Tensor, numbers: Tensor) -> None:
        """Set the numbers of a tensor's elements. `numbers` broadcasts to the tensor."""
        storage, view = tensor.untyped_storage(), Layout.of(tensor)
        size = storage.nbytes() // tensor.element_size() * (1 + tensor.is_complex())
        numbers = numbers.view(*[1] * (len(view.sizes) - numbers.ndim), *numbers.shape)
        if prod(view.sizes) < size:  # only part of the storage: keep all other numbers
            whole = numbers.new_full((size,), NONE)
            if storage in self.of:
                real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                whole.copy_(self.of[storage].read(real.as_strided((size,), (1,), 0)))
            whole.as_strided(view.sizes, view.strides, view.offset).copy_(numbers)
            numbers, view = whole, Layout(0, (size,), (1,))
        self.of[storage] = Shadow(view, numbers)

    def copy(self, copy: Tensor, source: Tensor) -> None:
        """Give each element in a copy the number of the element it was copied from."""
        if copy.stride() == source.stride():
            layout = self[source].layout
            moved = layout.offset + copy.storage_offset() - source.storage_offset()
            shadow = self[source]._replace(layout=layout._replace(offset=int(moved)))
            self.of[copy.untyped_storage()] = shadow
        else:
            self.write(copy, self[source].read(source))


def condensed(numbers: Tensor) -> Tensor:
    """Shorten each axis along which numbers are constant to length 1. Padding is ignored."""
    sizes = numbers.shape
    corners = [(size - 1) * prod(sizes[axis + 1 :]) for axis, size in enumerate(sizes)]
    first, *ends = numbers.flatten()[[0, *corners]].tolist() if numbers.numel() > 1 else [NONE]
    for axis, end in enumerate(ends):
        if sizes[axis] == 1 or 0 <= first != end >= 0:
            continue  # fast path for most axes
        last = numbers.amax(axis, keepdim=True)
        if bool(((numbers == last) | (numbers < 0)).all()):
            numbers = last
    return numbers


def is_strided(tensor: Tensor) -> bool:
    """Return whether a tensor is strided. Sparse tensors have no storage."""
    return tensor.layout == torch.strided


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors contained in lists, mappings and dataclasses."""
    if isinstance(values, Tensor):
        return [values]
    if values is None or isinstance(values, (int, float, str)):
        return []  # fast path for most non-tensor arguments
    if not isinstance(values, (list, tuple, Mapping)):
        values = vars(values) if is_dataclass(values) and not isinstance(values, type) else {}
    values = values if isinstance(values, (list, tuple)) else values.values()
    return [tensor for value in values for tensor in tensors_in(value)]
