"""The router of a mixture-of-experts layer: Megatron's, and it counts where tokens go."""

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class Router(TopKRouter):
    """Scores `[s, b, hidden]` tokens, gives each its top-k experts and adds up how many each got.

    tokens_per_expert   `[experts]` float32, over the micro-batches of a step on this rank. Megatron
                        counts only for the expert bias; the imbalance is of interest without it too
    """

    tokens_per_expert: Tensor

    def __init__(self, config: TransformerConfig, pg_collection: object = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        counts = torch.zeros(config.num_moe_experts, dtype=torch.float32)
        self.register_buffer("tokens_per_expert", counts, persistent=False)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """None; the engine calls it with every `[tokens, experts]` choice. Forwards that no
        backward follows (evaluation, the first pass of recomputation) do not count."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.tokens_per_expert += routing_map.sum(dim=0)
