"""Accumulation of gradients in their buckets, and the reduction of each bucket once complete."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from models.units import Unit
from parallel.comm.collectives import CommVolume, Pending, all_reduce_, reduce_scatter_
from parallel.comm.groups import Axis, Domain
from parallel.storage.buffers import Buffers

TIED_SUM: Final = "sum of a tied embedding"
"""Kind of communication between the first and the last pipeline stage."""

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
    tied          a tied embedding of which another pipeline stage holds a copy: its gradient is the
                  sum of those of both, over `domain.ends`
    """

    def __init__(
        self,
        buffers: Buffers,
        parameters: Mapping[str, torch.nn.Parameter],
        domain: Domain,
        comm_volume: CommVolume,
        *,
        tensor_sums: Sequence[Unit] = (),
        tied: Sequence[Unit] = (),
        overlap: bool = True,
    ) -> None:
        self.buffers = buffers
        self.domain = domain
        self.tensor_sums = tensor_sums
        self.tied = tied
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
            if self.domain.divisor > 1:
                self.buffers.shard(flat).div_(self.domain.divisor)
        for axis, kind, parts in self._partial:
            self._sum(axis, kind, parts)

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
    def _partial(self) -> list[tuple[Axis, str, list[Tensor]]]:
        """What this rank's shards hold of gradients that are partial sums, views: over which ranks,
        as what it is counted, and the views."""
        layout, rank = self.buffers.bucket_layout, self.buffers.replicas.rank
        partial = []
        for axis, kind, units in (
            (self.domain.tensor, "tensor-parallel sum of gradients", self.tensor_sums),
            (self.domain.ends, TIED_SUM, self.tied),
        ):
            spans = [span for unit in units for span in layout.shard_spans(unit, rank)]
            if axis is not None and axis.size > 1 and spans:
                flats = self.buffers.gradients
                parts = [flats[s.bucket].narrow(0, s.start, s.length) for s in spans]
                partial.append((axis, kind, parts))
        return partial

    def _sum(self, axis: Axis, kind: str, parts: list[Tensor]) -> None:
        """All-reduce the parts over an axis, packed."""
        packed = torch.cat(parts)
        all_reduce_(packed, axis, self.comm_volume, kind)
        torch._foreach_copy_(parts, list(packed.split([part.numel() for part in parts])))
