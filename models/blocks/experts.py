"""Mixture-of-experts layers: the router, the token dispatcher, and the expert matmuls.

The router is Megatron's, extended to count tokens per expert. These counts are used to measure the
experts' load balance and to update the expert bias. The global balancing loss uses the load of the
previous step. The current load is not known in time, because the backward pass of the first
micro-batch runs before the other micro-batches are routed. Megatron uses the load of the
micro-batches routed so far, so its loss depends on the micro-batch size and the number of ranks.

Every token is routed to `top_k` experts, and no tokens are dropped. Any routing therefore produces
`tokens * top_k` rows per rank, one per (token, expert) pair. Because this number is fixed, the
pairs can be sorted by expert without a mask, an index list of unknown length or a host sync. With
expert parallelism, one all-to-all sends the rows to the experts and another returns the results.
The host reads the number of rows per rank once per layer and pass. Forward and backward use gathers
rather than scatter-adds, whose summation order on a GPU varies from run to run.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import all_to_all_single

from models.blocks.activation import activation_of
from models.engine import take_losses


class Router(TopKRouter):
    """Selects the top-k experts for tokens `[s, b, hidden]` and counts tokens per expert.

    tokens_per_expert   `[experts]` float32, summed over a step's micro-batches on this rank.
                        Megatron only counts tokens if there is an expert bias, but the metrics
                        always require the counts
    earlier_load        `[experts]` float32, tokens per expert in the last step that was not
                        skipped, summed across ranks; zeros before the first step, None without the
                        global balancing loss
    """

    tokens_per_expert: Tensor
    earlier_load: Tensor | None

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        super().__init__(config=config, **options)
        counts = torch.zeros(config.num_moe_experts, dtype=torch.float32)
        self.register_buffer("tokens_per_expert", counts, persistent=False)
        on = self.get_aux_loss_coeff("global_aux_loss") > 0
        self.register_buffer("earlier_load", counts.clone() if on else None)
        # Clear the per-process state that an earlier model left in Megatron: the recorded balancing
        # losses have one entry per layer of that model, and the shape of the loss scale depends on
        # whether a schedule was the first to use it.
        take_losses()
        MoEAuxLossAutoScaler.main_loss_backward_scale = None

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        """Return the coefficient of a load-balancing loss, or 0 if it is disabled.

        Megatron sums the global loss over data-parallel ranks but averages the gradients over these
        ranks, which would divide the weight of the loss by the number of ranks. The returned
        coefficient compensates for this.
        """
        coefficient = super().get_aux_loss_coeff(aux_loss_type)
        if aux_loss_type != "global_aux_loss":
            return coefficient
        return coefficient * self.tp_dp_cp_group.size() / self.tp_cp_group.size()

    def _apply_global_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, **_: Any
    ) -> Tensor:
        """Attach the global balancing loss of the scores `[tokens, experts]` to `probs`, and return
        the result.

        The loss is `experts * sum_i(share_i * mean score_i)` from "Demons in the Detail" (arXiv
        2501.11873), where share_i is expert i's share of the previous step's tokens. Before the
        first step, all shares are equal.
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

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count tokens per expert in a routing map `[tokens, experts]`. Called by Megatron.

        Forward passes with gradients disabled (evaluation, the first pass under recomputation) are
        not counted.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.tokens_per_expert += routing_map.sum(dim=0)


ENGINE_LOSSES = {
    "seq_load_balancing_loss": "sequence_aux_loss",
    "global_load_balancing_loss": "global_aux_loss",
    "z_loss": "z_loss",
}
"""Maps Megatron's names of the balancing losses to config keys."""


def max_violation(counts: Tensor) -> Tensor:
    """Return MaxVio `[layers]` for token counts `[layers, experts]`: (max - mean) / mean, which is
    0 if all counts are equal.

    "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", equation 4.
    """
    mean = counts.mean(dim=1)
    return (counts.amax(dim=1) - mean) / mean


def routers(chunks: Iterable[torch.nn.Module]) -> list[Router]:
    """Return the routers in the model chunks, in forward order."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]


def token_counts(chunks: Iterable[torch.nn.Module]) -> Tensor:
    """Return the number of tokens `[layers, experts]` that this rank has routed to each expert
    since the last call to `balance_`.

    `balance_` and `max_violation` expect these counts summed over the ranks that hold the same
    layers. The shape is `[0, 0]` if the chunks contain no mixture-of-experts layers.
    """
    counts = [router.tokens_per_expert for router in routers(chunks)]
    return torch.stack(counts) if counts else torch.zeros(0, 0)


def layer_numbers(chunks: Iterable[torch.nn.Module]) -> list[int]:
    """Return the global 0-based index of each layer that has a router."""
    return [router.layer_number - 1 for router in routers(chunks)]


def take_balancing_losses() -> dict[str, Tensor]:
    """Return this rank's part of each balancing loss `[layers]`, and clear Megatron's record.

    The losses are not multiplied by their coefficients, and are summed over all micro-batches since
    the last call.

    To reduce the losses across ranks, sum the sequence loss over the ranks that share a sequence,
    sum the global loss over all ranks of a stage, and average the z-loss over all ranks of a stage.
    """
    return {ENGINE_LOSSES[name]: values for name, values in take_losses().items()}


def balance_(
    chunks: Iterable[torch.nn.Module], counts: Tensor, *, rate: float, active: Tensor | None = None
) -> None:
    """Finish a step: change every expert bias by `rate` or `-rate`, store the load for the global
    balancing loss, and reset the counts.

    `counts` `[layers, experts]` are token counts, summed across ranks. The biases of experts that
    received fewer tokens than the mean are raised, and the biases of experts with more are lowered
    ("Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", algorithm 1). Biases and
    loads are left unchanged if `active`, a 0-d bool tensor, is False.
    """
    with torch.no_grad():
        for router, load in zip(routers(chunks), counts, strict=True):
            if router.expert_bias is not None:
                move = rate * torch.sign(load.mean() - load)
                router.expert_bias += move if active is None else move * active
            if router.earlier_load is not None:
                earlier = router.earlier_load
                earlier.copy_(load if active is None else torch.where(active, load, earlier))
            router.tokens_per_expert.zero_()


Counts = list[list[int]]
"""`[ranks][local experts]`: number of rows for each expert on each rank."""


class SortedDispatcher(MoETokenDispatcher):
    """Sends tokens, sorted by expert, to their experts and returns the results.

    With expert-tensor-parallel size `tensor`, rank r of the group holds `local` experts, starting
    with expert `r // tensor * local`. If `tensor` is 1, the rank holds whole experts; otherwise, it
    holds shard `r % tensor` of each expert. Each row is sent to all shards of its expert, and the
    results of the shards are summed.

    on_host   whether the experts read the row counts from host memory
    """

    def __init__(
        self,
        local: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        *,
        on_host: bool,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.local = local
        self.ranks: int = self.tp_ep_group.size()
        self.on_host = on_host
        self.shape = torch.Size()
        self.order: Tensor | None = None  # permutation that sorts this rank's pairs by expert
        self.arrival: Tensor | None = None  # permutation that sorts received rows by expert
        self.rows: Tensor | None = None  # number of rows of each local expert
        self.sent: list[int] = []
        self.received: list[int] = []

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the rows `[tokens * top_k, hidden]` of this rank's tokens and the rows' gates,
        sorted by expert.

        `routing_map` and `probs` are `[tokens, experts]`.
        """
        self.shape = hidden_states.shape
        tokens = hidden_states.view(-1, self.shape[-1])
        top_k = self.config.moe_router_topk
        chosen = routing_map.to(torch.uint8).topk(top_k, dim=1).indices  # [tokens, top_k]
        self.order = chosen.flatten().argsort(stable=True)
        self.rows = routing_map.sum(0)
        gates = probs.gather(1, chosen).flatten().index_select(0, self.order)
        return spread(tokens, self.order, top_k), gates

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows for this rank's experts and the rows' gates, ordered by source rank."""
        assert self.rows is not None
        if self.ranks == 1:
            if self.on_host:
                self.rows = torch.tensor(self.counts_on_host(self.rows[None])[0][0])
            return hidden_states, probs
        # [expert ranks, tensor ranks, local] -> [ranks, local]
        outgoing = self.rows.view(-1, 1, self.local).expand(-1, self.tp_size, -1).flatten(0, 1)
        incoming = torch.empty_like(outgoing)
        all_to_all_single(incoming, outgoing.contiguous(), group=self.tp_ep_group)
        out, into = self.counts_on_host(outgoing, incoming)
        self.sent, self.received = ([sum(counts) for counts in side] for side in (out, into))
        self.rows = incoming.sum(0)
        if self.on_host:
            self.rows = torch.tensor(into).sum(0)
        self.arrival = self._arrival(incoming) if self.local > 1 else None
        return self._exchange(hidden_states), self._exchange(probs)

    def counts_on_host(self, *counts: Tensor) -> list[Counts]:
        """Copy the row counts `[ranks, local experts]` to the host. This forces a host sync."""
        rows: list[Counts] = torch.stack(counts).tolist()
        return rows

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows sorted by local expert, the row counts `[local]` and the gates."""
        assert self.rows is not None
        rows, self.rows = self.rows, None
        if self.arrival is None:
            return hidden_states, rows, probs
        return spread(hidden_states, self.arrival), rows, probs.index_select(0, self.arrival)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the expert outputs in the order in which their rows were received."""
        if self.arrival is None:
            return hidden_states
        arrival, self.arrival = self.arrival, None
        return collect(hidden_states, arrival)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Return the outputs for this rank's rows, summed over the shards of each expert."""
        if self.ranks == 1:
            return hidden_states
        back = all_to_all(self.tp_ep_group, hidden_states, self.sent, self.received)
        if self.tp_size == 1:
            return back
        parts = back.split(self.sent)
        # torch accumulates 16-bit sums in float32.
        added = [
            torch.stack(parts[i : i + self.tp_size]).sum(0)
            for i in range(0, self.ranks, self.tp_size)
        ]
        return torch.cat(added)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the sum of each token's expert outputs, in the shape of the layer's input."""
        assert self.order is not None
        order, self.order = self.order, None
        return collect(hidden_states, order, self.config.moe_router_topk).view(self.shape)

    def _exchange(self, rows: Tensor) -> Tensor:
        """Exchange rows between ranks. Each row is sent to all ranks with a shard of its expert."""
        if self.tp_size > 1:
            parts = rows.split(self.sent[:: self.tp_size])
            rows = torch.cat([part for part in parts for _ in range(self.tp_size)])
        return all_to_all(self.tp_ep_group, rows, self.received, self.sent)

    def _arrival(self, incoming: Tensor) -> Tensor:
        """Return the permutation that sorts rows by local expert. Rows are received in rank
        order."""
        experts = torch.arange(self.local, device=incoming.device).repeat(self.ranks)
        expert = experts.repeat_interleave(incoming.flatten(), output_size=sum(self.received))
        return expert.argsort(stable=True)


Move = Callable[[Tensor, Tensor, int], Tensor]


def spread(tokens: Tensor, order: Tensor, copies: int = 1) -> Tensor:
    """Copy each row of `tokens` `[tokens, hidden]` `copies` times, and permute the copies.

    Row i of the result `[tokens * copies, hidden]` is `tokens[order[i] // copies]`. `order` is a
    permutation of the row indices of the result.
    """
    rows: Tensor = _Moved.apply(tokens, order, copies, _spread, _collect)  # type: ignore[no-untyped-call]
    return rows


def collect(rows: Tensor, order: Tensor, copies: int = 1) -> Tensor:
    """Return the sum of each token's copies, `[tokens, hidden]`. The adjoint of `spread`."""
    tokens: Tensor = _Moved.apply(rows, order, copies, _collect, _spread)  # type: ignore[no-untyped-call]
    return tokens


def _spread(tokens: Tensor, order: Tensor, copies: int) -> Tensor:
    return tokens.index_select(0, order if copies == 1 else order // copies)


def _collect(rows: Tensor, order: Tensor, copies: int) -> Tensor:
    positions = torch.arange(len(order), device=order.device)
    back = rows.index_select(0, torch.empty_like(order).scatter_(0, order, positions))
    return back if copies == 1 else back.unflatten(0, (-1, copies)).sum(1)


class _Moved(torch.autograd.Function):
    """Applies `there` to rows, and its adjoint `back` to gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, order: Tensor, copies: int, there: Move, back: Move
    ) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies, ctx.back = copies, back
        return there(rows, order, copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return ctx.back(gradients[0], order, ctx.copies), None, None, None, None


class GroupedExperts(SequentialMLP):
    """Megatron's experts, computed with grouped GEMMs because the GEMM of a single small expert
    would not saturate a GPU.

    Parameters are the same as Megatron's: one matrix per expert and linear layer.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        gated = self.config.gated_linear_unit
        self.activation = activation_of(self.config.activation_func, gated=gated)
        self.activate: Callable[[Tensor, Tensor], Tensor] = self.activation.scaled

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Return the output `[tokens, hidden]` for tokens sorted by expert, and None as the bias.

        Expert i processes `tokens_per_expert[i]` tokens. The output of token t is multiplied by
        `permuted_probs[t]`.
        """
        tokens = permuted_local_hidden_states
        ends = tokens_per_expert.to(tokens.device).cumsum(0).to(torch.int32)
        wide = grouped_linear(tokens, ends, [e.linear_fc1.weight for e in self.local_experts])
        wide = self.activate(wide, permuted_probs)
        return grouped_linear(wide, ends, [e.linear_fc2.weight for e in self.local_experts]), None


def grouped_linear(tokens: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Multiply tokens `[tokens, cols]` by the transposed weights of their experts, returning
    `[tokens, rows]`.

    Tokens `ends[i - 1]` to `ends[i] - 1` belong to expert i, whose weight is `weights[i]` `[rows,
    cols]`. `ends` is int32. Tokens and weights are float32, bfloat16 or float16.
    """
    product: Tensor = _GroupedLinear.apply(tokens, ends, *weights)  # type: ignore[no-untyped-call]
    return product


class _GroupedLinear(torch.autograd.Function):
    """Grouped GEMM that stacks the weights again in backward instead of saving the stack."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, ends, *weights)
        if not len(tokens):  # the kernels do not support matmuls with zero rows
            return tokens.new_empty(0, weights[0].shape[0])
        return F.grouped_mm(tokens, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tokens, ends, *weights = ctx.saved_tensors
        upstream = gradients[0].contiguous()
        if not len(tokens):
            return torch.empty_like(tokens), None, *map(torch.zeros_like, weights)
        of_tokens = F.grouped_mm(upstream, torch.stack(weights), offs=ends)
        of_weights = F.grouped_mm(upstream.t(), tokens, offs=ends)
        return of_tokens, None, *of_weights.unbind()
