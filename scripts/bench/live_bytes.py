"""The peak of live tensor memory of a call, exactly and without the allocator's caches."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Watch(TorchDispatchMode):
    """Counts the storages that operations create while it is active, until they are freed."""

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
    """Largest sum of bytes of tensors that `call` created and still held at one moment."""
    with _Watch() as watch:
        call()
    return watch.peak


def held_and_peak_bytes(call: Callable[[], object], times: int) -> list[tuple[int, int]]:
    """Bytes of the tensors that were created since the first call: those held after each call, and
    the most held at one moment of it."""
    found = []
    with _Watch() as watch:
        for _ in range(times):
            watch.peak = watch.live
            call()
            found.append((watch.live, watch.peak))
    return found
