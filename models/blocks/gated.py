"""Gated activations whose gradient is one tensor that a Triton kernel writes in one pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.blocks.activation import Activation, tanh_gelu

IS_TANH = {F.silu: False, tanh_gelu: True}
"""The gates that the kernel computes."""


def with_one_gradient(
    activation: Activation, forward: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return `forward`, which is the activation's `block` or `scaled`, compiled or not, with the
    kernel's backward pass; `forward` itself if the kernel does not compute the activation."""
    if not activation.gated or activation.function not in IS_TANH:
        return forward
    from spectral.kernels import gated

    backward = partial(gated.gradients, tanh=IS_TANH[activation.function])

    def function(wide: Tensor, *scale: Tensor) -> Tensor:
        result: Tensor = _Gated.apply(forward, backward, wide, *scale)  # type: ignore[no-untyped-call]
        return result

    return function


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[..., Tensor],
        backward: Callable[..., tuple[Tensor, Tensor | None]],
        *inputs: Tensor,
    ) -> Tensor:
        ctx.gradients = backward
        ctx.save_for_backward(*inputs)
        return forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        return None, None, *ctx.gradients(*gradients, *inputs)[: len(inputs)]
