"""RMSNorm for Megatron's layer specs. It supports sequence parallelism, and fusion with the
preceding residual add.

Megatron adds a block's output to the residual stream in one pass over memory, and normalises the
sum in a second pass. In the backward pass, autograd adds the two gradients of the sum in a third
pass. The fused RMSNorm also computes the sum, and caches the normalised sum for the next call.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """Return `x / sqrt(mean(x^2) + epsilon) * gain` for `x` `[..., d]` and `gain` `[d]`, with the
    mean taken over d."""
    return F.rms_norm(x, gain.shape, gain, epsilon)


def rms_norm_gradients(
    gradient: Tensor, x: Tensor, gain: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` `[..., d]` and `gain` `[d]`, given the `gradient` of the result
    of `rms_norm`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    given, heads = gradient.to(wide), x.to(wide)
    scale = torch.rsqrt(heads.square().mean(-1, keepdim=True) + epsilon)
    normed, inner = heads * scale, given * gain.to(wide)
    of_x = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
    return of_x.to(x.dtype), (given * normed).flatten(0, -2).sum(0).to(gain.dtype)


def zero_centered_rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """Return the `rms_norm` of `x` multiplied by `1 + gain`, as in Gemma.

    Computed in float32 or wider: in bfloat16, `1 + gain` would round small gains to 0.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (F.rms_norm(wide, gain.shape, None, epsilon) * (1 + gain.to(wide.dtype))).to(x.dtype)


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm over the last dimension of `[..., hidden_size]`.

    Multiplies by `1 + gain` if the config enables zero-centered gains. Megatron's torch norm
    supports neither zero-centered gains nor sequence parallelism. Sequence parallelism requires a
    flag on the gain, because finalize_model_grads must all-reduce the gain's gradient over the
    parts of the sequence.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.function: Callable[[Tensor, Tensor, float], Tensor] = (
            zero_centered_rms_norm if config.layernorm_zero_centered_gamma else rms_norm
        )
        self.sum: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] | None = None
        self._last: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, stream: Tensor | None = None) -> Tensor:
        """Return the normalised `x`.

        If `stream` is given, return `x + stream` instead, and cache the normalised sum. If the next
        call's `x` is this sum, the next call returns the cached value.
        """
        assert self.eps is not None
        if stream is not None:
            assert self.sum is not None
            self._last = self.sum(x, stream, self.weight, self.eps)
            return self._last[0]
        last, self._last = self._last, None
        if last is not None and last[0] is x:
            return last[1]
        return self.function(x, self.weight, self.eps)


class NormedRowParallelLinear(RowParallelLinear):
    """`norm(x W^T)`, with the norm applied after the sum over tensor-parallel ranks. Under sequence
    parallelism, the norm is applied to this rank's part of the sequence."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.post_norm = RMSNorm(config, output_size, eps=config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """Return the normalised output `[s, b, output_size]`, and None as the bias."""
        output, _ = super().forward(input_)
        return self.post_norm(output), None


def normed_sum(x: Tensor, stream: Tensor, gain: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return `x + stream` `[..., d]` in the dtype of `x`, and the normalised sum."""
    total = x + stream.to(x.dtype)
    return total, rms_norm(total, gain, epsilon)


def sum_gradients(
    of_total: Tensor, of_normed: Tensor, total: Tensor, gain: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sum `total` `[..., d]` and of the gain `[d]`."""
    of_sum, of_gain = rms_norm_gradients(of_normed, total, gain, epsilon)
    return of_total + of_sum, of_gain


class SumFunctions(NamedTuple):
    """The functions `normed_sum` and `sum_gradients`, which may be compiled."""

    forward: Callable[..., tuple[Tensor, Tensor]] = normed_sum
    backward: Callable[..., tuple[Tensor, Tensor]] = sum_gradients

    def apply(
        self, x: Tensor, stream: Tensor, gain: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Apply `forward`, with `backward` as its autograd backward pass."""
        # Megatron enables gradients for the sum even if no input requires a gradient.
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
        of_sum, of_gain = ctx.functions.backward(*gradients, *ctx.saved_tensors, ctx.epsilon)
        return None, of_sum, of_sum.to(ctx.type), of_gain, None


def left_to(norm: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Callable[..., Tensor]]:
    """Return a bias-dropout-add function for Megatron. The function leaves the residual add to
    `norm`, the next norm."""

    def add(output: tuple[Tensor, Tensor | None], stream: Tensor, dropout: float) -> Tensor:
        x, bias = output
        assert dropout == 0
        return norm(x if bias is None else x + bias, stream)

    return lambda training, fused: add
