"""Count the bytes of tensors created by a call exactly, ignoring the allocator's caches."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Watch(TorchDispatchMode):
    """Counts the bytes of live storages created by operations while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        old = {
            x.untyped_storage()._cdata
            for x in tree_leaves((arguments, options))
            if isinstance(x, torch.Tensor)
        }
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), old)
        return result

    def _count(self, storage: torch.UntypedStorage, old: set[int]) -> None:
        key = storage._cdata
        if key in old or key in self.known:
            return
        size = storage.nbytes()
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the peak bytes of tensors created by `call`."""
    return held_and_peak_bytes(call, 1)[0][1]


def held_and_peak_bytes(call: Callable[[], object], times: int) -> list[tuple[int, int]]:
    """Call `call` several times. For each call, return the bytes of live tensors created since the
    first call began, after the call and at the peak during the call."""
    found = []
    with _Watch() as watch:
        for _ in range(times):
            watch.peak = watch.live
            call()
            found.append((watch.live, watch.peak))
    return found
