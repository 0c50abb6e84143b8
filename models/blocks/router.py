"""The router of a mixture-of-experts layer: Megatron's router with counts of tokens per expert.

The counts are used to measure the experts' load balance and to update the expert bias.

The global balancing loss uses the load of the previous step, because the load of the current step
is not known in time: the backward pass of the first micro-batch runs before the other micro-batches
are routed. Megatron uses the load of the micro-batches that were already routed, so Megatron's loss
depends on the micro-batch size and the number of ranks.
"""

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from models.engine import take_losses


class Router(TopKRouter):
    """Router that selects top-k experts for tokens `[s, b, hidden]` and counts tokens per expert.

    tokens_per_expert   `[experts]` float32, sum over a step's micro-batches on this rank. Megatron
                        counts only with an expert bias, but metrics always need the counts.
    earlier_load        `[experts]` float32, tokens per expert in the last step that was not
                        skipped, summed over all ranks; zeros before the first step. None without
                        the global balancing loss
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
        """Return the coefficient of one load-balancing loss, or 0 if it is disabled.

        Megatron sums the global loss over data-parallel ranks but averages gradients over these
        ranks, so the weight of the loss would be divided by their number. The returned coefficient
        corrects this.
        """
        coefficient = super().get_aux_loss_coeff(aux_loss_type)
        if aux_loss_type != "global_aux_loss":
            return coefficient
        return coefficient * self.tp_dp_cp_group.size() / self.tp_cp_group.size()

    def _apply_global_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, **_: Any
    ) -> Tensor:
        """Return `probs` with the global balancing loss of the scores `[tokens, experts]` attached.

        The loss is `experts * sum_i(share_i * mean score_i)` of "Demons in the Detail" (arXiv
        2501.11873), where share_i is expert i's share of the tokens of the previous step. Before
        the first step all shares are equal.
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
        """End a step: clear the counts and, if `active`, store the tokens per expert `[experts]` of
        all ranks."""
        if self.earlier_load is not None:
            taken = counts if active is None else torch.where(active, counts, self.earlier_load)
            self.earlier_load.copy_(taken)
        self.tokens_per_expert.zero_()

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens per expert of a routing map `[tokens, experts]`; called by Megatron.

        Forward passes without a backward pass (evaluation, the first pass under recomputation) are
        not counted.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.tokens_per_expert += routing_map.sum(dim=0)


def forget_earlier_models() -> None:
    """Clear Megatron's per-process state of an earlier model.

    Megatron's record of balancing losses has one entry per layer of the earlier model. The shape of
    these losses' scale depends on whether the scale was first used inside or outside a schedule.
    """
    take_losses()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


ENGINE_LOSSES = {
    "seq_load_balancing_loss": "sequence_aux_loss",
    "global_load_balancing_loss": "global_aux_loss",
    "z_loss": "z_loss",
}
"""Config keys of the balancing losses, by Megatron's names."""


def max_violation(counts: Tensor) -> Tensor:
    """Return MaxVio `[layers]` of token counts `[layers, experts]`: (max - mean) / mean, 0 if all
    counts are equal.

    "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", equation 4.
    """
    mean = counts.mean(dim=1)
    return (counts.amax(dim=1) - mean) / mean


def routers(chunks: Iterable[torch.nn.Module]) -> list[Router]:
    """Return the routers of the model chunks, in forward order."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]


def token_counts(chunks: Iterable[torch.nn.Module]) -> Tensor:
    """Return the number of tokens `[layers, experts]` that this rank routed to each expert since
    the last call of `balance_`.

    `balance_` and `max_violation` require the sum over the ranks that have the same layers. The
    shape is `[0, 0]` if the chunks have no mixture-of-experts layer.
    """
    counts = [router.tokens_per_expert for router in routers(chunks)]
    return torch.stack(counts) if counts else torch.zeros(0, 0)


def layer_numbers(chunks: Iterable[torch.nn.Module]) -> list[int]:
    """Return the global index, counted from 0, of each layer with a router."""
    return [router.layer_number - 1 for router in routers(chunks)]


def take_balancing_losses() -> dict[str, Tensor]:
    """Return this rank's part of each balancing loss `[layers]`, and clear Megatron's record.

    The losses are without coefficients, and are summed over the micro-batches since the last call.

    The parts must be added over the ranks that share a sequence for the sequence loss, added over
    all ranks of a stage for the global loss, and averaged over all ranks of a stage for the z-loss.
    """
    return {ENGINE_LOSSES[name]: values for name, values in take_losses().items()}


def balance_(
    chunks: Iterable[torch.nn.Module], counts: Tensor, *, rate: float, active: Tensor | None = None
) -> None:
    """End a step: change every expert bias by `rate` or `-rate`, and clear the counts.

    `counts` `[layers, experts]` are summed over all ranks. The bias of an expert with fewer tokens
    than the mean rises, and the bias of an expert with more tokens falls ("Auxiliary-Loss-Free Load
    Balancing Strategy for Mixture-of-Experts", algorithm 1). No bias changes if `active`, a 0-d
    bool tensor, is False.
    """
    with torch.no_grad():
        for router, load in zip(routers(chunks), counts, strict=True):
            if router.expert_bias is not None:
                move = rate * torch.sign(load.mean() - load)
                router.expert_bias += move if active is None else move * active
            router.note_load(load, active)
