"""The memory of a pretended device: what is allocated at each moment, as its allocator counts
it."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

ROUNDING = 512
"""Bytes that PyTorch's allocator rounds a tensor's memory up to."""


class Allocations:
    """Follows storages from their first use until the host has dropped them.

    live, peak   bytes now, and the most since `start_peak`
    """

    def __init__(self, allocated: Callable[[int], None], freed: Callable[[int], None]) -> None:
        """`allocated` and `freed` are told the number of each storage."""
        self.live = 0
        self.peak = 0
        self._allocated = allocated
        self._freed = freed
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def storage(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage, which is counted from now on."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number not in self._known:
            self._count(number, storage)
        return number

    def start_peak(self) -> None:
        """Measure the peak anew."""
        self.peak = self.live

    def _count(self, number: int, storage: torch.UntypedStorage) -> None:
        size = -(-storage.nbytes() // ROUNDING) * ROUNDING

        def gone(_: object) -> None:
            del self._known[number]
            self.live -= size
            self._freed(number)

        self._known[number] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)
        self._allocated(number)
