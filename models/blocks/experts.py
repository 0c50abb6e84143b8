"""Dispatch of tokens to experts, matrix products of the experts, and combination of the results.

Every token is routed to `top_k` experts, and no tokens are dropped. Any routing therefore results
in `tokens * top_k` rows per rank, one per (token, expert) pair. Because this number is known, the
pairs are sorted by expert without a mask, an index list of unknown length or a read by the host.
With expert parallelism, one all-to-all sends the rows to the experts, and another returns the
results; the host reads the number of rows per rank once per layer and pass. Forward and backward
use gathers instead of scatter-adds, whose order of summation on a GPU differs from run to run.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import all_to_all_single

from models.blocks.activation import activation_of

Counts = list[list[int]]
"""`[ranks][local experts]`: number of rows for each expert of each rank."""


def sort_tokens_(chunk: torch.nn.Module) -> None:
    """Use `SortedDispatcher` in every mixture-of-experts layer of a chunk."""
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            module.token_dispatcher = SortedDispatcher(
                module.num_local_experts,
                module.config,
                get_default_pg_collection(),
                on_host=not isinstance(module.experts, GroupedExperts),
            )


class SortedDispatcher(MoETokenDispatcher):
    """Dispatcher that sends each token to its experts, sorted by expert, and returns the results.

    For the expert-tensor-parallel size `tensor`, rank r of the group has `local` experts, starting
    with expert `r // tensor * local`. Experts are whole if `tensor` is 1; otherwise the rank has
    the `r % tensor`-th part of each expert. Rows are sent to all parts of an expert, and the parts'
    results are summed.

    on_host   whether the experts need the row counts in host memory
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
        """Return the rows `[tokens * top_k, hidden]` of this rank's tokens, and their gates, sorted
        by expert.

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
        """Return the rows for this rank's experts, and their gates, ordered by source rank."""
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
        """Return the row counts `[ranks, local experts]` on the host; this waits for the device."""
        rows: list[Counts] = torch.stack(counts).tolist()
        return rows

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows sorted by local expert, the row counts `[local]`, and the gates."""
        assert self.rows is not None
        rows, self.rows = self.rows, None
        if self.arrival is None:
            return hidden_states, rows, probs
        return spread(hidden_states, self.arrival), rows, probs.index_select(0, self.arrival)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the experts' results in the order of the received rows."""
        if self.arrival is None:
            return hidden_states
        arrival, self.arrival = self.arrival, None
        return collect(hidden_states, arrival)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Return the results of this rank's rows, summed over the parts of each expert."""
        if self.ranks == 1:
            return hidden_states
        back = all_to_all(self.tp_ep_group, hidden_states, self.sent, self.received)
        if self.tp_size == 1:
            return back
        parts = back.split(self.sent)
        # torch sums 16-bit values in float32.
        added = [
            torch.stack(parts[i : i + self.tp_size]).sum(0)
            for i in range(0, self.ranks, self.tp_size)
        ]
        return torch.cat(added)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the sum of every token's results, in the shape of the layer's input."""
        assert self.order is not None
        order, self.order = self.order, None
        return collect(hidden_states, order, self.config.moe_router_topk).view(self.shape)

    def _exchange(self, rows: Tensor) -> Tensor:
        """Exchange rows between ranks; a row is sent to all ranks with a part of its expert."""
        if self.tp_size > 1:
            parts = rows.split(self.sent[:: self.tp_size])
            rows = torch.cat([part for part in parts for _ in range(self.tp_size)])
        return all_to_all(self.tp_ep_group, rows, self.received, self.sent)

    def _arrival(self, incoming: Tensor) -> Tensor:
        """Return the permutation that sorts rows, received in rank order, by local expert."""
        experts = torch.arange(self.local, device=incoming.device).repeat(self.ranks)
        expert = experts.repeat_interleave(incoming.flatten(), output_size=sum(self.received))
        return expert.argsort(stable=True)


Move = Callable[[Tensor, Tensor, int], Tensor]


def spread(tokens: Tensor, order: Tensor, copies: int = 1) -> Tensor:
    """Return `[tokens * copies, hidden]`: row i is `tokens[order[i] // copies]`, for a permutation
    `order` of the copies of all `tokens` `[tokens, hidden]`."""
    rows: Tensor = _Moved.apply(tokens, order, copies, _spread, _collect)  # type: ignore[no-untyped-call]
    return rows


def collect(rows: Tensor, order: Tensor, copies: int = 1) -> Tensor:
    """Return `[tokens, hidden]`, the sum of each token's copies: the adjoint of `spread`."""
    tokens: Tensor = _Moved.apply(rows, order, copies, _collect, _spread)  # type: ignore[no-untyped-call]
    return tokens


def _spread(tokens: Tensor, order: Tensor, copies: int) -> Tensor:
    return tokens.index_select(0, order if copies == 1 else order // copies)


def _collect(rows: Tensor, order: Tensor, copies: int) -> Tensor:
    places = torch.arange(len(order), device=order.device)
    back = rows.index_select(0, torch.empty_like(order).scatter_(0, order, places))
    return back if copies == 1 else back.unflatten(0, (-1, copies)).sum(1)


class _Moved(torch.autograd.Function):
    """Autograd function that applies `there` to rows, and its adjoint `back` to gradients."""

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
    """Megatron's experts with grouped matrix products: products of single small experts would not
    fill a GPU.

    The parameters are the same as Megatron's: one matrix per expert and product.
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
        """Return the output `[tokens, hidden]` of tokens sorted by expert, and None as the bias.

        Expert i processes `tokens_per_expert[i]` tokens; the output of token t is multiplied by
        `permuted_probs[t]`.
        """
        tokens = permuted_local_hidden_states
        ends = tokens_per_expert.to(tokens.device).cumsum(0).to(torch.int32)
        wide = grouped_linear(tokens, ends, [e.linear_fc1.weight for e in self.local_experts])
        wide = self.activate(wide, permuted_probs)
        return grouped_linear(wide, ends, [e.linear_fc2.weight for e in self.local_experts]), None


def grouped_linear(tokens: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Multiply tokens `[tokens, cols]` by their experts' transposed weights, to `[tokens, rows]`.

    Tokens from `ends[i - 1]` to `ends[i]` (int32) are multiplied by `weights[i]` `[rows, cols]`.
    Tokens and weights are float32, bfloat16 or float16.
    """
    product: Tensor = _GroupedLinear.apply(tokens, ends, *weights)  # type: ignore[no-untyped-call]
    return product


class _GroupedLinear(torch.autograd.Function):
    """Autograd function that stacks the weights again in backward instead of saving the stack."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, ends, *weights)
        if not len(tokens):  # kernels do not support products without rows
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
