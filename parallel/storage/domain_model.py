"""The parameters of one domain on one rank: flat buckets of weights and gradients.

Parameters and gradients are views of the buckets, and shards are slices of the buckets. Gradients
are accumulated in their buckets, and each bucket is reduced when it is complete. New weights are
all-gathered.

Linear layers accumulate weight gradients in the buckets, within the matrix products that compute
the gradients. Otherwise every micro-batch would write a 16-bit gradient and add it to the float32
sum in another pass, which would move 10 bytes per parameter and round once more. The implementation
uses Megatron's hook for an extension of Apex.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor
from torch.nn.utils import parametrize

from models.units import Unit
from parallel.comm.collectives import CommVolume, Pending, all_gather_, all_reduce_, reduce_scatter_
from parallel.comm.groups import Axis, Domain
from parallel.storage.bucket_layout import BucketLayout
from spectral.batching import copy_all_


class Buffers:
    """Parameter and gradient buckets of one rank.

    parameters   one tensor `[numel]` per bucket in the model's dtype; model parameters are views
    gradients    one tensor `[numel]` per bucket; each parameter's `main_grad` is a view
    masters      this rank's shard `[numel / replicas]` of each bucket's master weights: a float32
                 copy of 16-bit parameters, or the shard of the parameters itself if they are wider
                 or if the owners of the bucket's units store its weights
    master       an empty tensor with the masters' device and dtype
    """

    def __init__(
        self,
        bucket_layout: BucketLayout,
        parameters: Mapping[str, torch.nn.Parameter],
        replicas: Axis,
        *,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        """Move the parameters' values into the buckets.

        Gradients are accumulated in `gradient_dtype`; None means float32 for 16-bit parameters, and
        the parameters' dtype for wider parameters.
        """
        self.bucket_layout = bucket_layout
        self.replicas = replicas
        some = next(iter(parameters.values()))
        self.parameters = [
            torch.zeros(b.numel, dtype=some.dtype, device=some.device)
            for b in bucket_layout.buckets
        ]
        wide = torch.promote_types(some.dtype, torch.float32)
        dtype = gradient_dtype or wide
        self.gradients = [torch.zeros_like(flat, dtype=dtype) for flat in self.parameters]
        for bucket, values, gradients in zip(
            bucket_layout.buckets, self.parameters, self.gradients, strict=True
        ):
            for slot in bucket.slots:
                parameter = parameters[slot.parameter]
                view = values.narrow(0, slot.offset, slot.numel).view(parameter.shape)
                view.copy_(parameter.detach())
                parameter.data = view
                gradient = gradients.narrow(0, slot.offset, slot.numel).view(view.shape)
                parameter.main_grad = gradient  # type: ignore[attr-defined]
        self.master = some.new_empty(0, dtype=wide)
        self.masters: list[Tensor] = []
        self.reload_masters()

    def reload_masters(self) -> None:
        """Set the master weights to the parameters' current values, e.g. after initialisation."""
        self.masters = [
            self.shard(flat) if bucket.stepped_by_owners else self.shard(flat).to(self.master.dtype)
            for flat, bucket in zip(self.parameters, self.bucket_layout.buckets, strict=True)
        ]

    def shard(self, flat: Tensor) -> Tensor:
        """Return a view of this rank's shard of the bucket `flat`."""
        size = flat.numel() // self.replicas.size
        return flat.narrow(0, self.replicas.rank * size, size)

    def gradient_shards(self) -> list[Tensor]:
        """Return views of this rank's shards of the gradient buckets."""
        return [self.shard(flat) for flat in self.gradients]


TIED_SUM: Final = "sum of a tied embedding"
"""Kind of communication between the first and the last pipeline stage."""

Observer = Callable[[str, Tensor], None]
"""Function that is called with a parameter's name and the parameter's gradient of one
micro-batch."""


class GradientReducer:
    """Accumulation of gradients in their buckets, and their reduction over the replicas.

    Megatron's schedules run all micro-batches except the last inside `no_sync`, and call `finish`
    at the end. With `overlap`, a bucket's reduce-scatter starts during the last backward pass, when
    the bucket's last gradient is complete. Otherwise all reduce-scatters start in `finish`.

    observe       called with each micro-batch's gradient of each parameter; None: no observer
    tensor_sums   units whose gradient is a sum over tensor-parallel ranks, such as gains under
                  sequence parallelism
    tied          a tied embedding with a copy on another pipeline stage; the gradients of both
                  copies are summed over `domain.ends`
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
        self.observe: Observer | None = None
        bucket_of = {name: i for i, names in enumerate(self._names) for name in names}
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(self._hook(name, bucket_of[name]))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Suppress reductions after micro-batches within a context."""
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def finish(self) -> None:
        """Wait until this rank's shard of every bucket contains the mean gradient."""
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
            packed = torch.cat(parts)
            all_reduce_(packed, axis, self.comm_volume, kind)
            torch._foreach_copy_(parts, list(packed.split([part.numel() for part in parts])))

    def _hook(self, name: str, bucket: int) -> Callable[[Tensor], None]:
        def accumulate(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None:  # None: the matrix product has accumulated the gradient
                if self.observe is not None:
                    self.observe(name, gradient)
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
        """(axis, kind of communication, gradient views) of each sum of partial gradients."""
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


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total` in the dtype of `total`, which may differ from the operands'
    dtype."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


class WeightProducts:
    """Replacement for Apex's extension, with the methods that Megatron calls."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, gradient: Tensor, total: Tensor) -> None:
        """Add a weight's gradient to `total` `[rows, cols]`, computed from the outputs' `gradient`
        `[tokens, rows]` and the `inputs` `[tokens, cols]`."""
        add_product_(total, gradient.t(), inputs)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def sum_in_products_(chunks: Iterable[torch.nn.Module], active: bool) -> None:
    """Enable or disable accumulation in `main_grad` by the linear layers of `chunks`.

    Weights that are computed in the forward pass have no `main_grad`, so their layers are excluded.
    If enabled, autograd receives None as the weight's gradient.
    """
    layers.fused_weight_gradient_mlp_cuda = WeightProducts
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, layers.ColumnParallelLinear | layers.RowParallelLinear):
                module.gradient_accumulation_fusion = active and not parametrize.is_parametrized(
                    module
                )


@dataclass
class DomainModel:
    """The dense parameters or the experts of one rank.

    stage_units   the units of every tensor-parallel rank of the domain's stage, in forward order
    comm_volume   counter of sent bytes
    gathers       all-gather of new weights, possibly still running, by bucket
    """

    domain: Domain
    stage_units: list[list[Unit]]
    buffers: Buffers
    reducer: GradientReducer
    comm_volume: CommVolume
    gathers: dict[int, Pending | None] = field(default_factory=dict)

    @property
    def units(self) -> list[Unit]:
        """Units on this rank, whole or in part, in forward order."""
        return self.stage_units[self.domain.tensor.rank]

    @torch.no_grad()
    def start_gathers(self, buckets: Sequence[int], comm_volume: CommVolume) -> None:
        """Round the masters of `buckets` into the parameters, and start their all-gathers."""
        flats = [self.buffers.parameters[bucket] for bucket in buckets]
        masters = [self.buffers.masters[bucket] for bucket in buckets]
        copy_all_(
            (self.buffers.shard(flat), master)
            for flat, master in zip(flats, masters, strict=True)
            if master.dtype != flat.dtype
        )
        for bucket, flat in zip(buckets, flats, strict=True):
            self.gathers[bucket] = all_gather_(flat, self.domain.replicas, comm_volume)

    def all_gather_weights(self) -> None:
        """Round the masters into the parameters, all-gather the parameters and wait.

        The sent bytes are not counted, because this method is not a part of a step.
        """
        buckets = range(len(self.buffers.parameters))
        self.start_gathers(buckets, CommVolume())
        self.wait(buckets)

    def wait(self, buckets: Sequence[int]) -> None:
        """Wait for the running all-gathers of `buckets`."""
        for bucket in buckets:
            handle = self.gathers.pop(bucket, None)
            if handle is not None:
                handle.wait()
