"""Flat memory of a layout: parameters and gradients are views of buckets, shards are slices."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parallel.comm.groups import Axis
from parallel.storage.bucket_layout import BucketLayout, Span


class Buffers:
    """Parameter and gradient buckets of one rank.

    parameters   per bucket, `[numel]` in the model's dtype; every model parameter is a view of it
    gradients    per bucket, `[numel]`; every parameter's `main_grad` is a view of it
    masters      per bucket, this rank's shard `[numel / replicas]` of the weights the optimizer
                 steps: float32 copies of 16-bit parameters, else the parameters' shard itself;
                 also where the units' owners keep what is stepped
    master       an empty tensor with the masters' device and dtype
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Mapping[str, torch.nn.Parameter],
        replicas: Axis,
        *,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        """Moves the parameters' values into the buckets. `gradient_dtype` None accumulates 16-bit
        parameters' gradients in float32 and others' in the parameters' dtype."""
        self.layout = layout
        self.replicas = replicas
        some = next(iter(parameters.values()))
        self.parameters = [
            torch.zeros(b.numel, dtype=some.dtype, device=some.device) for b in layout.buckets
        ]
        if gradient_dtype is None:
            gradient_dtype = torch.promote_types(some.dtype, torch.float32)
        self.gradients = [p.new_zeros(p.shape, dtype=gradient_dtype) for p in self.parameters]
        for bucket, values, gradients in zip(
            layout.buckets, self.parameters, self.gradients, strict=True
        ):
            for slot in bucket.slots:
                parameter = parameters[slot.parameter]
                view = values.narrow(0, slot.offset, slot.numel).view(parameter.shape)
                view.copy_(parameter.detach())
                parameter.data = view
                gradient = gradients.narrow(0, slot.offset, slot.numel).view(view.shape)
                parameter.main_grad = gradient  # type: ignore[attr-defined]
        self.master = some.new_empty(0, dtype=torch.promote_types(some.dtype, torch.float32))
        self.masters: list[Tensor] = []
        self.reload_masters()

    def reload_masters(self) -> None:
        """Take the masters anew from the parameters, as after initialisation."""
        self.masters = [
            self.shard(flat) if bucket.stepped_by_owners else self.shard(flat).to(self.master.dtype)
            for flat, bucket in zip(self.parameters, self.layout.buckets, strict=True)
        ]

    def shard(self, flat: Tensor) -> Tensor:
        """This replica's slice of a bucket, a view."""
        size = flat.numel() // self.replicas.size
        return flat.narrow(0, self.replicas.rank * size, size)

    def shard_range(self, span: Span, shards: Sequence[Tensor]) -> Tensor:
        """`[span.length]`, a span of this rank's, of one tensor per bucket's shard, a view."""
        first = self.replicas.rank * shards[span.bucket].numel()
        return shards[span.bucket].narrow(0, span.start - first, span.length)

    def collect(self, spans: Sequence[Span], shards: Sequence[Tensor], piece: Tensor) -> None:
        """Copy spans of this rank's to their places in a unit's flattened local `piece`."""
        for span in spans:
            piece.narrow(0, span.piece_start, span.length).copy_(self.shard_range(span, shards))

    def write_parameters(self, bucket: int) -> None:
        """Round this rank's masters of a bucket into its shard of the parameters."""
        if self.masters[bucket].dtype != self.parameters[bucket].dtype:
            self.shard(self.parameters[bucket]).copy_(self.masters[bucket])

    def zero_gradients(self) -> None:
        """Clear every gradient bucket."""
        torch._foreach_zero_(self.gradients)
