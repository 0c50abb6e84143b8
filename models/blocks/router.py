"""The router of a mixture-of-experts layer: Megatron's router, which also counts tokens per expert.

The counts measure the balance of the experts, and update the expert bias that balances them.

The global balancing loss uses the load of the previous whole step, because the present step's load
is unknown: the backward pass of the first micro-batch runs before the other micro-batches are
routed. Megatron uses the load of the micro-batches so far, so its loss depends on the size of
micro-batches and on the number of ranks.
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
    """Score tokens `[s, b, hidden]`, choose the top-k experts of each and count tokens per expert.

    tokens_per_expert   `[experts]` float32, over the micro-batches of a step on this rank. Megatron
                        counts only for the expert bias; the metrics of balance always need counts.
    earlier_load        `[experts]` float32, tokens per expert of the last step taken, over all
                        ranks; zeros before the first. None if there is no global loss
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

        The engine's global loss is a sum over data-parallel ranks, while gradients are a mean over
        them, so its weight would fall with the number of ranks; the returned coefficient corrects
        this.
        """
        coefficient = super().get_aux_loss_coeff(aux_loss_type)
        if aux_loss_type != "global_aux_loss":
            return coefficient
        return coefficient * self.tp_dp_cp_group.size() / self.tp_cp_group.size()

    def _apply_global_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, **_: Any
    ) -> Tensor:
        """Return `probs` with the global loss of the scores `[tokens, experts]` attached.

        It is `experts * sum_i(share_i * mean score_i)` of "Demons in the Detail" (arXiv
        2501.11873), with the shares of the previous step, or equal shares before the first step.
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
        """Count the tokens of a `[tokens, experts]` routing map; the engine calls it for every map.

        Forward passes without a backward pass (evaluation, the first pass of recomputation) do not
        count.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.tokens_per_expert += routing_map.sum(dim=0)


def forget_earlier_models() -> None:
    """Clear the engine's per-process state of an earlier model.

    The engine's log of balancing losses has one entry per layer of the earlier model. The scale of
    these losses has a shape that depends on whether it was first used inside or outside a schedule.
    """
    take_losses()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


ENGINE_LOSSES = {
    "seq_load_balancing_loss": "sequence_aux_loss",
    "global_load_balancing_loss": "global_aux_loss",
    "z_loss": "z_loss",
}
"""The engine's and the config's names of the balancing losses."""


def max_violation(counts: Tensor) -> Tensor:
    """Return MaxVio `[layers]` of token counts `[layers, experts]`: (max - mean) / mean, 0 if all
    are equal.

    "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", equation 4.
    """
    mean = counts.mean(dim=1)
    return (counts.amax(dim=1) - mean) / mean


def routers(chunks: Iterable[torch.nn.Module]) -> list[Router]:
    """Return the routers of the model chunks, in forward order."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]


def token_counts(chunks: Iterable[torch.nn.Module]) -> Tensor:
    """Return the tokens `[layers, experts]` that this rank sent to each expert since `balance_`.

    `balance_` and `max_violation` take the sum over the ranks that hold the same layers. The shape
    is `[0, 0]` if the chunks have no mixture-of-experts layer.
    """
    counts = [router.tokens_per_expert for router in routers(chunks)]
    return torch.stack(counts) if counts else torch.zeros(0, 0)


def layer_numbers(chunks: Iterable[torch.nn.Module]) -> list[int]:
    """Return the global index, from 0, of each layer with a router."""
    return [router.layer_number - 1 for router in routers(chunks)]


def take_balancing_losses() -> dict[str, Tensor]:
    """Return this rank's part of each balancing loss of every layer `[layers]`, and clear it.

    The losses do not contain their coefficients, and are summed over the micro-batches since the
    last call.

    The sequence loss is a sum over the ranks that share a sequence, the global loss is a sum over
    all ranks of a stage, and the z-loss is a mean over them.
    """
    return {ENGINE_LOSSES[name]: values for name, values in take_losses().items()}


def balance_(
    chunks: Iterable[torch.nn.Module], counts: Tensor, *, rate: float, active: Tensor | None = None
) -> None:
    """End a step: move every expert bias by `rate` against its load and clear the counts.

    `counts` `[layers, experts]` are summed over all ranks. The bias of an expert below its share
    rises, the bias of an expert above it falls ("Auxiliary-Loss-Free Load Balancing Strategy for
    Mixture-of-Experts", algorithm 1). `active` is a 0-d bool; if it is false no bias moves.
    """
    with torch.no_grad():
        for router, load in zip(routers(chunks), counts, strict=True):
            if router.expert_bias is not None:
                move = rate * torch.sign(load.mean() - load)
                router.expert_bias += move if active is None else move * active
            router.note_load(load, active)
