"""Closed-form gradients that refuse, loudly, to be differentiated again."""

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
    """`gradient`, which raises RuntimeError if its derivative with respect to `inputs` is asked
    for.

    torch's own `once_differentiable` objects only where the incoming gradient has a graph;
    elsewhere the second derivative comes out as a silent zero. `name` is that of the function in
    the message.
    """
    if not torch.is_grad_enabled():  # no graph of the gradient is being built
        return gradient
    out: Tensor = _Refusal.apply(gradient, name, *inputs)  # type: ignore[no-untyped-call]
    return out
