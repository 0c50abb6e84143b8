"""The router of a mixture-of-experts layer: Megatron's, and it counts where tokens go."""

import torch
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_moe_layer_wise_logging_tracker,
)
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
        forget_earlier_models()

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        """Coefficient of one of the load-balancing losses, 0 if it is off.

        The engine's global loss is a sum over data-parallel ranks of which gradients take the mean,
        so that its weight would fall with their number; this makes up for it.
        """
        coefficient = super().get_aux_loss_coeff(aux_loss_type)
        if aux_loss_type != "global_aux_loss":
            return coefficient
        return coefficient * self.tp_dp_cp_group.size() / self.tp_cp_group.size()

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """None; the engine calls it with every `[tokens, experts]` choice. Forwards that no
        backward follows (evaluation, the first pass of recomputation) do not count."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.tokens_per_expert += routing_map.sum(dim=0)


def forget_earlier_models() -> None:
    """Clear what the engine keeps per process and an earlier model shaped: its log of
    balancing losses has that model's number of layers, and their scale the shape of its first use,
    in a schedule or outside of one."""
    get_moe_layer_wise_logging_tracker().clear()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
