"""What functions with closed-form gradients share: their input, and an error at second order."""

from typing import Any

import torch
from torch import Tensor


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, name: str, *inputs: Tensor) -> Tensor:
        ctx.name = name
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError(f"{ctx.name} can be differentiated only once")


def wide_matrices(w: Tensor) -> Tensor:
    """Return matrices `[..., rows, cols]` in at least float32; raises ValueError for what is none.

    Level 4 of a PC layer in bfloat16, for one, has an error of 3 to 4% in the spectral norm.
    """
    if w.ndim < 2 or not w.is_floating_point():
        raise ValueError(
            f"w must be floating point [..., rows, cols], got {w.dtype} {list(w.shape)}"
        )
    return w.to(torch.promote_types(w.dtype, torch.float32))


def differentiable_once(gradient: Tensor, name: str, *inputs: Tensor) -> Tensor:
    """Return `gradient` such that differentiating it by `inputs` raises RuntimeError.

    torch's own `once_differentiable` raises only where the incoming gradient has a graph; elsewhere
    the second derivative is silently zero. `name` is the function named in the message.
    """
    if not torch.is_grad_enabled():  # no graph of the gradient is being built
        return gradient
    out: Tensor = _Refusal.apply(gradient, name, *inputs)  # type: ignore[no-untyped-call]
    return out
