"""Core attention on PyTorch's scaled_dot_product_attention: flash on GPUs, also runs on CPUs."""

import math

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class SDPACoreAttention(torch.nn.Module):
    """Causal softmax(q k^T / sqrt(d)) v; grouped-query heads are never repeated in memory.

    Takes the place of Megatron's DotProductAttention, which materialises the scores `[s, s]`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__()
        if config.context_parallel_size != 1:
            raise ValueError(
                f"the sdpa attention backend needs context parallel size 1, "
                f"got {config.context_parallel_size}"
            )
        if attention_type != "self" or attn_mask_type != AttnMaskType.causal:
            raise ValueError(
                f"the sdpa attention backend is causal self-attention, "
                f"got {attention_type!r} with mask {attn_mask_type}"
            )
        head_size = config.kv_channels
        self.scale = 1.0 / math.sqrt(head_size) if softmax_scale is None else softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: object
    ) -> Tensor:
        """Attention output `[s, b, heads * d]` of `query` `[s, b, heads, d]` and
        `key`, `value` `[s, b, groups, d]`. The causal mask is implied, `attention_mask` unused."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, d]
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.permute(2, 0, 1, 3).flatten(2)  # [s, b, heads * d]
