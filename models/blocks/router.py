"""The router of a mixture-of-experts layer: Megatron's, and it counts where tokens go.

The load that the global balancing loss compares with is that of the whole step before: backward of
a step's first micro-batch runs before the others are routed, so the step's own load is not known.
Megatron takes the micro-batches so far, with which the loss depends on their size and the ranks.
"""

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
    earlier_load        `[experts]` float32, tokens per expert of the last step taken, over all
                        ranks; zeros before the first. None without the global loss
    """

    tokens_per_expert: Tensor
    earlier_load: Tensor | None

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        super().__init__(config=config, **options)
        counts = torch.zeros(config.num_moe_experts, dtype=torch.float32)
        self.register_buffer("tokens_per_expert", counts, persistent=False)
        on = self.get_aux_loss_coeff("global_aux_loss") > 0
        self.register_buffer("earlier_load", counts.clone() if on else None)
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

    def _apply_global_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, **_: Any
    ) -> Tensor:
        """Return `probs` with the global loss attached, of `[tokens, experts]` scores.

        It is `experts * sum_i(share_i * mean score_i)` of "Demons in the Detail" (arXiv
        2501.11873), with the shares of the step before, or even ones before the first.
        """
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        if self.earlier_load is None:
            return probs
        experts, tokens = len(self.earlier_load), len(scores_for_aux_loss)
        total = self.earlier_load.sum()
        share = torch.where(total > 0, self.earlier_load / total.clamp_min(1), 1 / experts)
        means = scores_for_aux_loss.sum(dim=0) / (tokens * self.tp_dp_cp_group.size())
        attached: Tensor = self.attach_and_log_load_balancing_loss(
            probs,
            coefficient,
            coefficient * experts * (share * means).sum(),
            "global_load_balancing_loss",
            self.tp_dp_cp_group,
        )
        return attached

    def note_load(self, counts: Tensor, active: Tensor | None) -> None:
        """End a step: keep the tokens per expert `[experts]` of all ranks, unless not `active`."""
        if self.earlier_load is not None:
            taken = counts if active is None else torch.where(active, counts, self.earlier_load)
            self.earlier_load.copy_(taken)
        self.tokens_per_expert.zero_()

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
