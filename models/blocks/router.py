"""The router of a mixture-of-experts layer: Megatron's, and it counts where tokens go."""

from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from models.engine import take_losses


class Router(TopKRouter):
    """Score tokens `[s, b, hidden]`, choose the top-k experts of each and count tokens per expert.

    tokens_per_expert   `[experts]` float32, over the micro-batches of a step on this rank. Megatron
                        counts for the expert bias alone; the metrics of balance need it without.
    """

    tokens_per_expert: Tensor

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        super().__init__(config=config, **options)
        counts = torch.zeros(config.num_moe_experts, dtype=torch.float32)
        self.register_buffer("tokens_per_expert", counts, persistent=False)
        forget_earlier_models()

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        """Return the coefficient of one of the load-balancing losses, 0 if it is off.

        The engine's global loss is a sum over data-parallel ranks, while gradients are a mean over
        them, so that its weight would fall with their number; this corrects it.
        """
        coefficient = super().get_aux_loss_coeff(aux_loss_type)
        if aux_loss_type != "global_aux_loss":
            return coefficient
        return coefficient * self.tp_dp_cp_group.size() / self.tp_cp_group.size()

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of a `[tokens, experts]` choice; the engine calls it with each.

        Forward passes without a backward (evaluation, the first of recomputation) do not count.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.tokens_per_expert += routing_map.sum(dim=0)


def forget_earlier_models() -> None:
    """Clear what the engine keeps per process of an earlier model.

    Its log of balancing losses has that model's number of layers, and their scale has the shape of
    its first use, in a schedule or outside of one.
    """
    take_losses()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
