"""Memory and values of the host where a device would have given them."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros in host memory, which takes no room until it is written: a copy from the device
    that nobody reads costs nothing."""
    if dtype.is_complex:
        return torch.zeros(tuple(shape), dtype=dtype)
    return torch.from_numpy(np.zeros(tuple(shape), INTEGERS[dtype.itemsize])).view(dtype)


def value_of(dtype: torch.dtype) -> Any:
    """Return what a value of the device is taken for where the host reads it: True, 1 or 1.0."""
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def values_of(shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Return nested lists of `value_of`."""
    if not shape:
        return value_of(dtype)
    return [values_of(shape[1:], dtype) for _ in range(shape[0])]


class PinnedMemory:
    """Which memory of the host is pinned: a copy between it and the device need not be waited
    for."""

    def __init__(self) -> None:
        self._ranges: dict[int, int] = {}  # first address to the one after the last

    def pin(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, whose memory counts as pinned as long as it exists."""
        storage = tensor.untyped_storage()
        first = storage.data_ptr()
        self._ranges[first] = first + storage.nbytes()
        weakref.finalize(storage, self._ranges.pop, first, None).atexit = False
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is pinned."""
        place = tensor.data_ptr()
        return any(first <= place < end for first, end in self._ranges.items())
