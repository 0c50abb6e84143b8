"""Accumulation of gradients in their buckets, and the reduction of each bucket once complete."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from parallel.comm.collectives import CommVolume, Pending, all_reduce_, reduce_scatter_
from parallel.comm.groups import Domain
from parallel.storage.buffers import Buffers

Observer = Callable[[str, Tensor], None]
"""Called with a parameter's name and its gradient of one micro-batch."""


class GradientReducer:
    """Accumulates gradients in their buckets and averages the shards over the replicas.

    Megatron's schedules run all but the last micro-batch inside `no_sync` and call `finish` at the
    end. With `overlap`, a bucket's reduce-scatter starts during the last backward pass, when its
    last gradient is there, and overlaps with the rest; otherwise all start in `finish`.

    observers     by name, what is called with each micro-batch's gradient of each parameter
    tensor_sums   names of parameters whose gradient is a sum over tensor-parallel ranks: the gains
                  under sequence parallelism, where each rank sees its part of the sequence
    """

    def __init__(
        self,
        buffers: Buffers,
        parameters: Mapping[str, torch.nn.Parameter],
        domain: Domain,
        comm_volume: CommVolume,
        *,
        tensor_sums: frozenset[str] = frozenset(),
        overlap: bool = True,
    ) -> None:
        self.buffers = buffers
        self.tensor = domain.tensor
        self.divisor = domain.divisor
        self.tensor_sums = tensor_sums
        self.overlap = overlap
        self.comm_volume = comm_volume
        self._names = [{slot.parameter for slot in b.slots} for b in buffers.bucket_layout.buckets]
        self._pending = [set(names) for names in self._names]
        self._handles: dict[int, Pending | None] = {}
        self._syncing = True
        self.observers: dict[str, Observer] = {}
        bucket_of = {name: i for i, names in enumerate(self._names) for name in names}
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(self._hook(name, bucket_of[name]))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of micro-batches after which no reduction starts."""
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def finish(self) -> None:
        """Wait until this rank's shard of every bucket holds the mean gradient."""
        for bucket in range(len(self._names)):
            if bucket not in self._handles:
                self._reduce(bucket)
        for handle in self._handles.values():
            if handle is not None:
                handle.wait()
        self._handles.clear()
        self._pending = [set(names) for names in self._names]
        for flat in self.buffers.gradients:
            if self.divisor > 1:
                self.buffers.shard(flat).div_(self.divisor)
        self._sum_over_tensor_ranks()

    def _hook(self, name: str, bucket: int) -> Callable[[Tensor], None]:
        def accumulate(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None:  # else its product has added it
                for observe in self.observers.values():
                    observe(name, gradient)
                parameter.main_grad.add_(gradient)  # type: ignore[attr-defined]
                parameter.grad = None
            if self._syncing and self.overlap:
                self._pending[bucket].discard(name)
                if not self._pending[bucket] and bucket not in self._handles:
                    self._reduce(bucket)

        return accumulate

    def _reduce(self, bucket: int) -> None:
        self._handles[bucket] = reduce_scatter_(
            self.buffers.gradients[bucket], self.buffers.replicas, self.comm_volume
        )

    def _sum_over_tensor_ranks(self) -> None:
        """All-reduce this shard's part of the gradients that are partial sums, packed."""
        if self.tensor.size == 1 or not self.tensor_sums:
            return
        parts = [
            self.buffers.gradients[i].narrow(0, start, length)
            for i, start, length in self._sums_in_shard()
        ]
        if not parts:
            return
        packed = torch.cat(parts)
        all_reduce_(packed, self.tensor, self.comm_volume, "tensor-parallel sum of gradients")
        torch._foreach_copy_(parts, list(packed.split([part.numel() for part in parts])))

    def _sums_in_shard(self) -> Iterator[tuple[int, int, int]]:
        """`(bucket, start, length)` of the parts of `tensor_sums` in this rank's shards."""
        replicas = self.buffers.replicas
        for i, bucket in enumerate(self.buffers.bucket_layout.buckets):
            size = bucket.numel // replicas.size
            first, last = replicas.rank * size, (replicas.rank + 1) * size
            for slot in bucket.slots:
                start, stop = max(slot.offset, first), min(slot.offset + slot.numel, last)
                if slot.parameter in self.tensor_sums and start < stop:
                    yield i, start, stop - start
