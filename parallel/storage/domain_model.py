"""The parameters of one domain on one rank: flat weight and gradient buckets.

Parameters and gradients are views into the buckets, and shards are slices of the buckets. Gradients
are accumulated in the buckets, and each bucket is reduced once it is complete. New weights are
all-gathered.

Linear layers accumulate weight gradients in the buckets as part of the wgrad GEMM. Otherwise every
micro-batch would write a 16-bit gradient and add it to the float32 sum in a separate pass, which
moves 10 bytes per parameter and rounds once more. The implementation uses Megatron's hook for an
Apex extension.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Final

import torch
from torch import Tensor

from models.units import Unit
from parallel.comm.collectives import CommVolume, Pending, all_gather_, all_reduce_, reduce_scatter_
from parallel.comm.groups import Axis, Domain
from parallel.storage.bucket_layout import BucketLayout
from spectral.batching import copy_all_

TIED_SUM: Final = "sum of a tied embedding"
"""Name of the collective between the first and last pipeline stages."""

Observer = Callable[[str, Tensor], None]
"""Function called with a parameter's name and its gradient for one micro-batch."""


class DomainModel:
    """The dense parameters or the experts on one rank.

    Megatron's schedules run all micro-batches except the last inside `ParallelModel.no_sync`, and
    call `finish_gradients` at the end. With `overlap`, a bucket's reduce-scatter starts during the
    last backward pass, as soon as all of its gradients are complete. Otherwise all reduce-scatters
    start in `finish_gradients`.

    stage_units   each tensor-parallel rank's list of units in the stage, in forward order
    parameters    one tensor `[numel]` per bucket, in the model's dtype; model parameters are views
    gradients     one tensor `[numel]` per bucket; each parameter's `main_grad` is a view
    masters       this rank's shard `[numel / replicas]` of each bucket's master weights: a float32
                  copy of 16-bit parameters, or the parameter shard itself if parameters are wider
                  or if the bucket's weights are stored by owners
    master        empty tensor with the device and dtype of the masters
    is_last       whether gradients are those of the last micro-batch
    gathers       all-gathers of new weights by bucket, possibly still in flight
    observe       called with every parameter's gradient for each micro-batch; None: no observer
    comm_volume   counts bytes sent
    """

    def __init__(
        self,
        domain: Domain,
        stage_units: list[list[Unit]],
        parameters: Mapping[str, torch.nn.Parameter],
        bucket_layout: BucketLayout,
        comm_volume: CommVolume,
        *,
        gradient_dtype: torch.dtype | None = None,
        overlap: bool = True,
        sequence_parallel: bool = False,
    ) -> None:
        """Move the values of `parameters`, by name, into the buckets, and accumulate gradients.

        Gradients are accumulated in `gradient_dtype`, which defaults to float32 for 16-bit
        parameters and to the parameter dtype for wider ones.
        """
        self.domain = domain
        self.stage_units = stage_units
        self.bucket_layout = bucket_layout
        self.comm_volume = comm_volume
        self.overlap = overlap
        self.sequence_parallel = sequence_parallel
        self.observe: Observer | None = None
        self.gathers: dict[int, Pending | None] = {}
        buckets = bucket_layout.buckets
        some = parameters[buckets[0].slots[0].parameter]
        wide = torch.promote_types(some.dtype, torch.float32)
        self.master = some.new_empty(0, dtype=wide)
        self.parameters = [some.new_zeros(b.numel) for b in buckets]
        self.gradients = [
            torch.zeros_like(flat, dtype=gradient_dtype or wide) for flat in self.parameters
        ]
        self._names = [{slot.parameter for slot in bucket.slots} for bucket in buckets]
        self._pending = [set(names) for names in self._names]
        self._reductions: dict[int, Pending | None] = {}
        self.is_last = True
        for name, (bucket, slot) in bucket_layout.slots.items():
            parameter, place = parameters[name], slice(slot.offset, slot.offset + slot.numel)
            view = self.parameters[bucket.index][place].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            gradient = self.gradients[bucket.index][place].view(view.shape)
            parameter.main_grad = gradient  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(
                partial(self._accumulate, name, bucket.index)
            )
        self.masters: list[Tensor] = []
        self.reload_masters()

    @property
    def units(self) -> list[Unit]:
        """Units that this rank stores in whole or in part, in forward order."""
        return self.stage_units[self.domain.tensor.rank]

    @property
    def partial_sums(self) -> list[tuple[Axis, str, list[Unit]]]:
        """One (axis, collective name, units) tuple for each sum of gradients over an axis other
        than the replicas.

        These are the units whose gradient is a sum over tensor-parallel ranks, such as gains under
        sequence parallelism, and a tied embedding with a copy on another pipeline stage.
        """
        by_tensor = [u for u in self.units if u.summed_over_tensor(self.sequence_parallel)]
        sums = [(self.domain.tensor, "tensor-parallel sum of gradients", by_tensor)]
        if self.domain.ends is not None:
            sums.append((self.domain.ends, TIED_SUM, [u for u in self.units if u.tied_stage]))
        return [(axis, kind, units) for axis, kind, units in sums if axis.size > 1 and units]

    def reload_masters(self) -> None:
        """Set the master weights to the current parameter values, e.g. after initialisation."""
        self.masters = [
            self.shard(flat) if bucket.stepped_by_owners else self.shard(flat).to(self.master.dtype)
            for flat, bucket in zip(self.parameters, self.bucket_layout.buckets, strict=True)
        ]

    def weight(self, unit: Unit) -> Tensor:
        """Return a view of this rank's piece of `unit` in the parameters."""
        bucket, slot = self.bucket_layout.slots[unit.parameter]
        return unit.view(self.parameters[bucket.index].narrow(0, slot.offset, slot.numel))

    def shard(self, flat: Tensor) -> Tensor:
        """Return a view of this rank's shard of the bucket `flat`."""
        size = flat.numel() // self.domain.replicas.size
        return flat.narrow(0, self.domain.replicas.rank * size, size)

    def gradient_shards(self) -> list[Tensor]:
        """Return views of this rank's shards of the gradient buckets."""
        return [self.shard(flat) for flat in self.gradients]

    def finish_gradients(self) -> None:
        """Wait until this rank's shard of every bucket holds the mean gradient."""
        for bucket in range(len(self._names)):
            if bucket not in self._reductions:
                self._reduce(bucket)
        for reduction in self._reductions.values():
            if reduction is not None:
                reduction.wait()
        self._reductions.clear()
        self._pending = [set(names) for names in self._names]
        if self.domain.divisor > 1:
            for shard in self.gradient_shards():
                shard.div_(self.domain.divisor)
        for axis, kind, parts in self._partial:
            packed = torch.cat(parts)
            all_reduce_(packed, axis, self.comm_volume, kind)
            torch._foreach_copy_(parts, list(packed.split([part.numel() for part in parts])))

    def _accumulate(self, name: str, bucket: int, parameter: Tensor) -> None:
        """Add a parameter's gradient to its bucket, which is reduced once it is complete."""
        gradient = parameter.grad
        if gradient is not None:  # None: already accumulated by the wgrad GEMM
            if self.observe is not None:
                self.observe(name, gradient)
            parameter.main_grad.add_(gradient)  # type: ignore[attr-defined]
            parameter.grad = None
        if self.is_last and self.overlap:
            self._pending[bucket].discard(name)
            if not self._pending[bucket] and bucket not in self._reductions:
                self._reduce(bucket)

    def _reduce(self, bucket: int) -> None:
        self._reductions[bucket] = reduce_scatter_(
            self.gradients[bucket], self.domain.replicas, self.comm_volume
        )

    @cached_property
    def _partial(self) -> list[tuple[Axis, str, list[Tensor]]]:
        """The gradient views of this rank's shards to sum, for each sum in `partial_sums`."""
        layout, rank, flats = self.bucket_layout, self.domain.replicas.rank, self.gradients
        sums = []
        for axis, kind, units in self.partial_sums:
            spans = [span for unit in units for span in layout.shard_spans(unit, rank)]
            if spans:
                views = [flats[s.bucket].narrow(0, s.start, s.length) for s in spans]
                sums.append((axis, kind, views))
        return sums

    @torch.no_grad()
    def start_gathers(self, buckets: Sequence[int], comm_volume: CommVolume) -> None:
        """Round the master weights of `buckets` into the parameters, and start the all-gathers."""
        flats = [self.parameters[bucket] for bucket in buckets]
        masters = [self.masters[bucket] for bucket in buckets]
        copy_all_(
            (self.shard(flat), master)
            for flat, master in zip(flats, masters, strict=True)
            if master.dtype != flat.dtype
        )
        for bucket, flat in zip(buckets, flats, strict=True):
            self.gathers[bucket] = all_gather_(flat, self.domain.replicas, comm_volume)

    def all_gather_weights(self) -> None:
        """Round the master weights into the parameters, all-gather the parameters, and wait.

        The bytes sent are not counted, because this all-gather is not part of a step.
        """
        buckets = range(len(self.parameters))
        self.start_gathers(buckets, CommVolume())
        self.wait(buckets)

    def wait(self, buckets: Sequence[int]) -> None:
        """Wait for any all-gathers of `buckets` that are still in flight."""
        for bucket in buckets:
            handle = self.gathers.pop(bucket, None)
            if handle is not None:
                handle.wait()


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`, whose dtype may differ from the operands' dtype."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


class WeightProducts:
    """Drop-in replacement for the Apex extension, with the methods called by Megatron."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, gradient: Tensor, total: Tensor) -> None:
        """Compute a weight gradient from the output `gradient` `[tokens, rows]` and the `inputs`
        `[tokens, cols]`, and add it to `total` `[rows, cols]`."""
        add_product_(total, gradient.t(), inputs)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
