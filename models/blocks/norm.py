"""RMSNorm that Megatron's layer specs accept, also under sequence parallelism."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


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
