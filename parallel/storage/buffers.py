"""Flat memory of the buckets: parameters and gradients are views of them, shards are slices."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parallel.comm.groups import Axis
from parallel.storage.bucket_layout import BucketLayout
from spectral.batching import copy_all_


class Buffers:
    """Parameter and gradient buckets of one rank.

    parameters   per bucket, `[numel]` in the model's dtype; every model parameter is a view of it
    gradients    per bucket, `[numel]`; every parameter's `main_grad` is a view of it
    masters      per bucket, this rank's shard `[numel / replicas]` of the weights that the
                 optimizer steps: a float32 copy of 16-bit parameters, or the parameters' shard
                 itself if they are wider or if the owners of the bucket's units keep its weights
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

        Gradients are accumulated in `gradient_dtype`; None stands for float32 with 16-bit
        parameters and for the parameters' dtype with wider ones.
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
        """Set the masters to the parameters' present values, for instance after initialisation."""
        self.masters = [
            self.shard(flat) if bucket.stepped_by_owners else self.shard(flat).to(self.master.dtype)
            for flat, bucket in zip(self.parameters, self.bucket_layout.buckets, strict=True)
        ]

    def shard(self, flat: Tensor) -> Tensor:
        """View of this rank's shard of the bucket `flat`."""
        size = flat.numel() // self.replicas.size
        return flat.narrow(0, self.replicas.rank * size, size)

    def gradient_shards(self) -> list[Tensor]:
        """Views of this rank's shard of every gradient bucket."""
        return [self.shard(flat) for flat in self.gradients]

    def write_parameters(self, buckets: Sequence[int]) -> None:
        """Round this rank's master shards of `buckets` into its shards of the parameters."""
        both = [(self.parameters[bucket], self.masters[bucket]) for bucket in buckets]
        copy_all_((self.shard(flat), master) for flat, master in both if master.dtype != flat.dtype)

    def zero_gradients(self) -> None:
        """Clear every gradient bucket."""
        torch._foreach_zero_(self.gradients)
