"""Triton kernels for the first and last elementwise passes of a matrix rule's step.

The first pass updates the momentum and computes the step direction,

    M <- mu M + (1 - mu) G,    G <- mu M + (1 - mu) G with Nesterov momentum, else M.

This pass moves 16 bytes per element of float32 G and M. The reference, `MomentumRule.accumulate` in
PyTorch, takes two or three passes of 12 bytes per element.

The last pass decays and updates the weights, and sums the squares of the update,

    W <- (1 - lr decay) W - step D,    and sum D^2 per program.

This pass moves 10 bytes per element of float32 W and 16-bit D. For rules with retraction, it first
rescales W. Each matrix's learning rate, decay and active flag are read on the device.
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
    """Average one block of `grad` into `mean`. `grad` and `mean` are contiguous `[numel]`."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    g = tl.load(grad + place, mask=inside, other=0.0)
    m = tl.load(mean + place, mask=inside, other=0.0)
    # Select rather than multiply: NaN from a skipped step must not reach the mean.
    g = tl.where(tl.load(active) != 0, g, m)
    m += share * (g - m)
    tl.store(mean + place, m, mask=inside)
    if NESTEROV:
        m += share * (g - m)
    tl.store(grad + place, m, mask=inside)


def average_(grad: Tensor, mean: Tensor, decay: float, active: Tensor, *, nesterov: bool) -> None:
    """Update the gradient's mean in place, and write the step direction to `grad`.

    Args:
        grad, mean: contiguous float32 tensors of equal shapes.
        decay: mu, the mean's decay rate.
        active: bool, 0-d, on the same device. If False, `mean` is left unchanged and copied to
            `grad`.
        nesterov: whether the direction averages the gradient into the new mean once more.
    """
    if grad.numel():
        momentum_kernel[(triton.cdiv(grad.numel(), BLOCK),)](
            grad, mean, active.view(torch.uint8), 1 - decay, grad.numel(),
            NESTEROV=nesterov,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def update_kernel(  # type: ignore[no-untyped-def]
    weight, direction, squares, scale, factor, step, active,
    numel, cols, parts,
    d_batch, d_row, d_col,
    SCALED: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block of one matrix in `weight`, contiguous `[batch, numel]`."""
    matrix = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    place = part * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    w = tl.load(weight + matrix * numel + place, mask=inside, other=0.0)
    source = direction + matrix * d_batch + (place // cols) * d_row + (place % cols) * d_col
    d = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    tl.store(squares + tl.program_id(0), tl.sum(d * d, axis=0))
    scaled = w
    if SCALED:
        scaled = w * tl.load(scale + matrix)
    decayed = scaled * tl.load(factor + matrix)
    if CAUTIOUS:
        decayed = tl.where(((w > 0) & (d < 0)) | ((w < 0) & (d > 0)), scaled, decayed)
    new = decayed - d * tl.load(step + matrix)
    # Select rather than multiply: NaN from a skipped unit must not reach the weights.
    taken = tl.load(active + matrix) != 0
    new = tl.where(taken, new, w)
    tl.store(weight + matrix * numel + place, new, mask=inside)


def update_(
    weight: Tensor,
    direction: Tensor,
    factor: Tensor,
    step: Tensor,
    active: Tensor,
    scale: Tensor | None = None,
    cautious: bool = False,
) -> Tensor:
    """Update `weight` in place where `active`, and return ||direction||^2 `[batch]`.

    The update is `weight <- factor weight - step direction`. If `scale` is given, `weight` is first
    multiplied by `scale`.

    Args:
        weight: `[batch, rows, cols]`, float32, contiguous.
        direction: `[batch, rows, cols]`, float32 or 16-bit, any strides.
        factor, step: `[batch]`, float32, contiguous, on the same device.
        active: bool, 0-d or `[batch]`, on the same device.
        scale: like `factor`, or None.
        cautious: skip multiplication by `factor` where weight and direction have opposite signs.

    Raises:
        ValueError: if a matrix has 2^31 elements or more.
    """
    if weight.shape[1:].numel() >= 2**31:
        shape = tuple(weight.shape[1:])
        raise ValueError(f"a matrix must have fewer than 2^31 elements, got shape {shape}")
    batch, numel = weight.shape[0], weight.shape[1:].numel()
    parts = triton.cdiv(numel, BLOCK)
    gate = active.expand(batch).contiguous().view(torch.uint8)
    squares = weight.new_empty(batch, parts)  # each program writes its own entry
    if weight.numel():
        update_kernel[(batch * parts,)](
            weight, direction, squares, factor if scale is None else scale, factor, step,
            gate,
            numel, weight.shape[2], parts,
            *direction.stride(),
            SCALED=scale is not None,
            CAUTIOUS=cautious,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
    return squares.sum(1)
