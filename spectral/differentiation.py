"""Closed-form gradients that raise an error when they are differentiated again."""

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


def differentiable_once(gradient: Tensor, name: str, *inputs: Tensor) -> Tensor:
    """Return `gradient` such that differentiating it by `inputs` raises RuntimeError.

    torch's own `once_differentiable` raises only where the incoming gradient has a graph; elsewhere
    the second derivative is silently zero. `name` is the function named in the message.
    """
    if not torch.is_grad_enabled():  # no graph of the gradient is being built
        return gradient
    out: Tensor = _Refusal.apply(gradient, name, *inputs)  # type: ignore[no-untyped-call]
    return out
