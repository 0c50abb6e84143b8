"""Triton kernel of a matrix rule's first pass: mean of the gradient, and what to step along.

    M <- mu M + (1 - mu) G,    G <- mu M + (1 - mu) G with Nesterov's look ahead, else M,

in one pass over both: per element it moves 16 bytes for float32 G and M. The reference is
`MomentumRule.accumulate` by the library, which takes two to three passes of 12 bytes. The predicate
is read on the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def momentum_kernel(  # type: ignore[no-untyped-def]
    grad, mean, active, share, numel,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Average one part of `grad` into `mean`, `[numel]` each, contiguous."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    g = tl.load(grad + place, mask=inside, other=0.0)
    m = tl.load(mean + place, mask=inside, other=0.0)
    # A selection, not a product: NaN of a skipped step must not reach the mean.
    g = tl.where(tl.load(active) != 0, g, m)
    m += share * (g - m)
    tl.store(mean + place, m, mask=inside)
    if NESTEROV:
        m += share * (g - m)
    tl.store(grad + place, m, mask=inside)


def average_(grad: Tensor, mean: Tensor, decay: float, active: Tensor, *, nesterov: bool) -> None:
    """Average a gradient into its mean, in place, and write to `grad` what to step along.

    Args:
        grad, mean: of equal shapes, float32, contiguous.
        decay: of the mean.
        active: bool, 0-d, on the same device. If it is False, the mean stays, and takes the place
            of the gradient.
        nesterov: step along the mean of the gradient and its mean.
    """
    if grad.numel():
        momentum_kernel[(triton.cdiv(grad.numel(), BLOCK),)](
            grad, mean, active.view(torch.uint8), 1 - decay, grad.numel(),
            NESTEROV=nesterov,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
