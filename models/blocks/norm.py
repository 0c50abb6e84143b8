"""RMSNorm that Megatron's layer specs accept, also under sequence parallelism."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """`x / sqrt(mean(x^2) + epsilon) * gain` over the last dimension, `[..., d]`, gain `[d]`."""
    return F.rms_norm(x, gain.shape, gain, epsilon)


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm of the last dimension, `[..., hidden_size]` to the same shape.

    Megatron's own torch norm refuses sequence parallelism. All it takes is the flag on the gain:
    its gradient is a sum over the sequence shards, which finalize_model_grads then all-reduces.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.function: Callable[[Tensor, Tensor, float], Tensor] = rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """The normed `x`, of its shape."""
        assert self.eps is not None
        return self.function(x, self.weight, self.eps)
