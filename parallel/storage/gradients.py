"""Accumulation of gradients in their buckets, and the reduction of each bucket once complete."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from models.units import Unit
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
    tensor_sums   units whose gradient is a sum over tensor-parallel ranks: the gains under sequence
                  parallelism, where each rank sees its part of the sequence
    """

    def __init__(
        self,
        buffers: Buffers,
        parameters: Mapping[str, torch.nn.Parameter],
        domain: Domain,
        comm_volume: CommVolume,
        *,
        tensor_sums: Sequence[Unit] = (),
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

    @cached_property
    def _partial(self) -> list[Tensor]:
        """What this rank's shards hold of gradients that are partial sums, views."""
        layout, rank = self.buffers.bucket_layout, self.buffers.replicas.rank
        spans = [span for unit in self.tensor_sums for span in layout.shard_spans(unit, rank)]
        return [self.buffers.gradients[s.bucket].narrow(0, s.start, s.length) for s in spans]

    def _sum_over_tensor_ranks(self) -> None:
        """All-reduce this shard's part of the gradients that are partial sums, packed."""
        if self.tensor.size == 1 or not self._partial:
            return
        packed = torch.cat(self._partial)
        all_reduce_(packed, self.tensor, self.comm_volume, "tensor-parallel sum of gradients")
        parts = packed.split([part.numel() for part in self._partial])
        torch._foreach_copy_(self._partial, list(parts))
