"""The residual stream after a block, summed and normed by one function.

Megatron adds a block's output to the stream and calls the next norm on the sum, two passes over it;
autograd adds the two gradients of the sum in a third. Here the sum is left to the norm, which keeps
its result until it is called.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.blocks.norm import rms_norm, rms_norm_gradients


def normed_sum(x: Tensor, stream: Tensor, gain: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return `x + stream` `[..., d]` in the type of `x`, and its norm."""
    total = x + stream.to(x.dtype)
    return total, rms_norm(total, gain, epsilon)


def sum_gradients(
    of_total: Tensor, of_normed: Tensor, total: Tensor, gain: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the gradient of both terms of `total` `[..., d]`, and that of the gain `[d]`."""
    found, of_gain = rms_norm_gradients(of_normed, total, gain, epsilon)
    return of_total + found, of_gain


class SumFunctions(NamedTuple):
    """`normed_sum` and `sum_gradients`, compiled or not."""

    forward: Callable[..., tuple[Tensor, Tensor]] = normed_sum
    backward: Callable[..., tuple[Tensor, Tensor]] = sum_gradients

    def apply(
        self, x: Tensor, stream: Tensor, gain: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Return what `normed_sum` does."""
        # Megatron turns gradients on around the sum, also where none are wanted.
        with torch.set_grad_enabled(x.requires_grad or stream.requires_grad):
            both: tuple[Tensor, Tensor] = _NormedSum.apply(  # type: ignore[no-untyped-call]
                self, x, stream, gain, epsilon
            )
        return both


class _NormedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, functions: SumFunctions, x: Tensor, stream: Tensor, gain: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        total, normed = functions.forward(x, stream, gain, epsilon)
        ctx.functions, ctx.epsilon, ctx.type = functions, epsilon, stream.dtype
        ctx.save_for_backward(total, gain)
        return total, normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found, of_gain = ctx.functions.backward(*gradients, *ctx.saved_tensors, ctx.epsilon)
        return None, found, found.to(ctx.type), of_gain, None


def left_to(norm: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Callable[..., Tensor]]:
    """Return what adds a block's output to the stream, as Megatron asks for it, by the RMSNorm that
    is called on the sum next."""

    def add(output: tuple[Tensor, Tensor | None], stream: Tensor, dropout: float) -> Tensor:
        x, bias = output
        assert dropout == 0
        return norm(x if bias is None else x + bias, stream)

    return lambda training, fused: add
