"""A row-parallel linear whose output is normed, as the last one of a block with a post-norm."""

from typing import Any

from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from models.blocks.norm import RMSNorm


class NormedRowParallelLinear(RowParallelLinear):
    """`norm(x W^T)`: the norm sees the sum over the tensor-parallel ranks, or the part of the
    sequence that sequence parallelism leaves this rank."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.post_norm = RMSNorm(config, output_size, eps=config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """Return the normed output `[s, b, output_size]` and no bias."""
        output, _ = super().forward(input_)
        return self.post_norm(output), None
