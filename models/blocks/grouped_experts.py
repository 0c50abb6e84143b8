"""Routed experts whose products are each one grouped matrix product over all experts of a rank."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from models.blocks.activation import activation_of


class GroupedExperts(SequentialMLP):
    """Megatron's experts with grouped products, so that many small experts keep a GPU busy.

    Parameters are the same: one matrix per expert and product.
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
        """Return the output `[tokens, hidden]` of tokens that are sorted by expert, and no bias.

        There are `tokens_per_expert` `[experts]` of each; every output is scaled by its token's
        `permuted_probs` `[tokens]`.
        """
        tokens = permuted_local_hidden_states
        ends = tokens_per_expert.to(tokens.device).cumsum(0).to(torch.int32)
        wide = grouped_linear(tokens, ends, [e.linear_fc1.weight for e in self.local_experts])
        wide = self.activate(wide, permuted_probs)
        return grouped_linear(wide, ends, [e.linear_fc2.weight for e in self.local_experts]), None


def grouped_linear(tokens: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return tokens `[tokens, cols]` times their experts' transposed weights, `[tokens, rows]`.

    Tokens from `ends[i - 1]` to `ends[i]` (int32) are those of `weights[i]` `[rows, cols]`. All are
    float32, bfloat16 or float16.
    """
    product: Tensor = _GroupedLinear.apply(tokens, ends, *weights)  # type: ignore[no-untyped-call]
    return product


class _GroupedLinear(torch.autograd.Function):
    """Stack the weights for each product and keep no stack, which is as large as the weights."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, ends, *weights)
        if not len(tokens):  # kernels have no products without rows
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
