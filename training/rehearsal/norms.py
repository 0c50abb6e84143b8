"""The fused norm that PyTorch has on a GPU, where a build without CUDA takes five operations."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.rehearsal.operations import size_of
from training.rehearsal.replacement import put
from training.rehearsal.trace import Trace


def install(trace: Trace) -> None:
    """Replace `rms_norm` on the device, for the life of this process."""
    plain = F.rms_norm

    class Fused(torch.autograd.Function):
        """The norm as one launch forward, which keeps a number per row, and one backward."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, gain: Tensor | None) -> Tensor:
            out = torch.empty_like(x)
            scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
            kept = [x, scale] if gain is None else [x, scale, gain]
            launch("_fused_rms_norm", [x] if gain is None else [x, gain], [out, scale])
            ctx.save_for_backward(*kept)
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            kept = list(ctx.saved_tensors)
            made = [torch.empty_like(kept[0]), *(torch.empty_like(gain) for gain in kept[2:])]
            launch("_fused_rms_norm_backward", [gradients[0], *kept], made)
            return made[0], made[1] if len(made) > 1 else None

    def launch(name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        size = sum(size_of(each) for each in (*reads, *writes))
        trace.launch(name, reads, writes, size=size)

    def rms_norm(
        x: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        """As `torch.nn.functional.rms_norm`, which is fused for a gain of the input's type."""
        if not x.is_cuda or (weight is not None and weight.dtype != x.dtype):
            return plain(x, list(normalized_shape), weight, eps)
        found: Tensor = Fused.apply(x, weight)  # type: ignore[no-untyped-call]
        return found

    put(F, "rms_norm", rms_norm)
