"""Triton kernel for the backward pass of gated activations, `f(gate) up`.

f(x) = x sigmoid(z(x)). With z(x) = x, f is SiLU. With z(x) = sqrt(8 / pi) (x + 0.044715 x^3), f is
the tanh approximation of GELU. If g is the gradient of the output, the gradients of gate and up are

    g up f'(gate)  with  f' = sigmoid(z) + f (1 - sigmoid(z)) z',    and    g f(gate).

Both gradients are written to a single tensor in one pass, which reads three elements and writes two
elements per element of g. Compiled code that concatenates the two gradients reads g and the gate
twice. The reference is autograd's gradient of `f(gate) * up`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Number of columns per program iteration."""
OF_A_WARP = 256
"""Number of block elements per warp: each thread loads eight 16-bit elements at once."""
ROOT = tl.constexpr(math.sqrt(8 / math.pi))
CUBIC = tl.constexpr(0.044715)


@triton.jit  # type: ignore[untyped-decorator]
def gated_kernel(  # type: ignore[no-untyped-def]
    gradient, wide, scale, out, of_scale, cols,
    TANH: tl.constexpr,
    SCALED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one row of `wide` `[rows, 2 cols]`. All tensors are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    inner = tl.zeros((BLOCK,), WIDE)
    for first in range(0, cols, BLOCK):
        col = first + tl.arange(0, BLOCK)
        inside = col < cols
        g = tl.load(gradient + row * cols + col, mask=inside, other=0.0).to(WIDE)
        gate = tl.load(wide + row * 2 * cols + col, mask=inside, other=0.0).to(WIDE)
        up = tl.load(wide + (row * 2 + 1) * cols + col, mask=inside, other=0.0).to(WIDE)
        if TANH:
            z = ROOT * (gate + CUBIC * gate * gate * gate)
            slope = ROOT * (1 + 3 * CUBIC * gate * gate)
        else:
            z = gate
            slope = 1.0
        small = tl.exp(-tl.abs(z))  # never infinite
        share = tl.where(z >= 0, 1.0, small) / (1 + small)
        activated = gate * share
        if SCALED:
            inner += g * activated * up
            g = g * tl.load(scale + row).to(WIDE)
        of_gate = g * up * (share + activated * (1 - share) * slope)
        target = out + row * 2 * cols + col
        tl.store(target, of_gate.to(out.dtype.element_ty), mask=inside)
        tl.store(target + cols, (g * activated).to(out.dtype.element_ty), mask=inside)
    if SCALED:
        tl.store(of_scale + row, tl.sum(inner).to(of_scale.dtype.element_ty))


def gradients(
    gradient: Tensor, wide: Tensor, scale: Tensor | None = None, *, tanh: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of `wide` and of `scale` (if given) from the output's gradient.

    Args:
        gradient: gradient of `scale f(gate) up`, `[..., d]`.
        wide: concatenated gate and up `[..., 2 d]`, in the dtype of `gradient`.
        scale: per-row multiplier, `[...]`; None means 1.
        tanh: whether f is the tanh approximation of GELU rather than SiLU.
    """
    gradient, wide = gradient.contiguous(), wide.contiguous()
    out = torch.empty_like(wide)
    of_scale = None if scale is None else torch.empty_like(scale.contiguous())
    cols = gradient.shape[-1]
    block = min(BLOCK, triton.next_power_of_2(cols))
    if gradient.numel():
        gated_kernel[(gradient.numel() // cols,)](
            gradient, wide, None if scale is None else scale.contiguous(), out, of_scale, cols,
            TANH=tanh,
            SCALED=scale is not None,
            WIDE=tl.float64 if wide.dtype == torch.float64 else tl.float32,
            BLOCK=block,
            num_warps=max(1, block // OF_A_WARP),
        )  # fmt: skip
    return out, of_scale
