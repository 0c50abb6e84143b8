"""The memory of a pretended device: what is allocated at each moment, as its allocator counts
it."""

import weakref
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

ROUNDING = 512
"""Bytes that PyTorch's allocator rounds a tensor's memory up to."""


class Allocations:
    """Follows storages from their first use until the host has dropped them.

    live, peak   bytes now, and the most since `start_peak`
    pools        the most bytes at one moment by the stream that was current when they were
                 allocated: PyTorch's allocator keeps a pool for each, and what one stream has freed
                 no other uses
    """

    def __init__(
        self,
        stream: Callable[[], int],
        allocated: Callable[[int, int], None],
        freed: Callable[[int], None],
    ) -> None:
        """`stream` is the current one; `allocated` is told the number of each new storage and its
        stream, `freed` the number of each that is gone."""
        self.live = 0
        self.peak = 0
        self.pools: Counter[int] = Counter()
        self._in_pool: Counter[int] = Counter()
        self._stream = stream
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
        stream = self._stream()

        def gone(_: object) -> None:
            del self._known[number]
            self.live -= size
            self._in_pool[stream] -= size
            self._freed(number)

        self._known[number] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)
        self._in_pool[stream] += size
        self.pools[stream] = max(self.pools[stream], self._in_pool[stream])
        self._allocated(number, stream)
