"""The loss of each token from hidden states and head, without ever shard_part all logits.

Logits of one micro-batch are `[tokens, vocabulary]`: in float32, with the softmax that backward
needs, they are by far the largest activations of a model with a large vocabulary. Here the
vocabulary is passed in chunks, with a running maximum and sum (M. Milakov and N. Gimelshein,
"Online normalizer calculation for softmax", 2018); backward computes each chunk's logits once more,
and so one more product with the head. With tensor parallelism every rank passes its own part.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int, group: ProcessGroup | None
) -> Tensor:
    """`-log softmax(hidden weight^T)[label]` per token, `[tokens]`, float32 or wider.

    Args:
        hidden: `[tokens, width]`. Its gradient is this rank's part of a sum over `group`.
        weight: `[rows, width]`, this rank's rows of the head.
        labels: `[tokens]`, row of `weight`; any other number if the row is on another rank.
        chunk: rows whose logits exist at a time.
        group: ranks that share the vocabulary, None if this one has it all.

    Raises ValueError unless `chunk >= 1`.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    losses: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, chunk, group
    )
    return losses


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        group: ProcessGroup | None,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        highest = hidden.new_full((len(hidden),), float("-inf"), dtype=wide)
        total, chosen = torch.zeros_like(highest), torch.zeros_like(highest)
        for rows, here in _chunks(weight, labels, chunk):
            logits = (hidden @ rows.T).to(wide)
            chosen += logits.gather(1, here.clamp(0, len(rows) - 1)[:, None])[:, 0].where(
                _inside(here, rows), 0
            )
            higher = torch.maximum(highest, logits.amax(1))
            total *= (highest - higher).exp()
            total += logits.sub_(higher[:, None]).exp_().sum(1)
            highest = higher
        if group is not None:
            own = highest.clone()
            all_reduce(highest, ReduceOp.MAX, group)
            sums = torch.stack((total * (own - highest).exp(), chosen))
            all_reduce(sums, ReduceOp.SUM, group)
            total, chosen = sums
        normalizer = highest + total.log()
        ctx.save_for_backward(hidden, weight, labels, normalizer)
        ctx.chunk = chunk
        return normalizer - chosen

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, normalizer = ctx.saved_tensors
        hidden_gradient = torch.zeros_like(hidden, dtype=normalizer.dtype)
        weight_gradient = torch.empty_like(weight)
        targets = torch.split(weight_gradient, ctx.chunk)
        for (rows, here), target in zip(_chunks(weight, labels, ctx.chunk), targets, strict=True):
            p = (hidden @ rows.T).to(normalizer.dtype).sub_(normalizer[:, None]).exp_()
            index = here.clamp(0, len(rows) - 1)[:, None]
            p.scatter_add_(1, index, -_inside(here, rows).to(p.dtype)[:, None])
            p = p.mul_(gradient[:, None]).to(hidden.dtype)
            torch.mm(p.T, hidden, out=target)
            hidden_gradient += p @ rows
        return hidden_gradient.to(hidden.dtype), weight_gradient, None, None, None


def _chunks(weight: Tensor, labels: Tensor, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Successive rows of `weight`, and the labels counted from the first of them."""
    for i, rows in enumerate(torch.split(weight, chunk)):
        yield rows, labels - i * chunk


def _inside(labels: Tensor, rows: Tensor) -> Tensor:
    return (labels >= 0) & (labels < len(rows))


class ChunkedHead(ColumnParallelLinear):
    """Megatron's output layer, which given labels returns losses instead of logits."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        labels: Tensor | None = None,
        chunk: int = 0,
    ) -> Any:
        """The loss of each token `[sequence, batch]` of hidden states `[sequence, batch, width]`
        (a part of the sequence with sequence parallelism), or without labels what Megatron
        returns."""
        if labels is None:
            return super().forward(input_, weight, runtime_gather_output)
        group = self.tp_group
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(input_, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(input_, group=group)
        losses = linear_cross_entropy(
            hidden.flatten(0, 1),
            self.weight,
            labels.flatten() - group.rank() * self.output_size_per_partition,
            chunk=chunk,
            group=group if group.size() > 1 else None,
        )
        return losses.view(labels.shape)


class ChunkedLossModel(GPTModel):
    """Megatron's model, whose loss takes `loss_chunk` entries of a rank's vocabulary at a time, or,
    where that is None, all of them in Megatron's own way."""

    def __init__(self, *arguments: Any, loss_chunk: int | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.loss_chunk = loss_chunk
        if self.post_process and loss_chunk is not None:
            self.output_layer = ChunkedHead(
                self.config.hidden_size,
                self.vocab_size,
                config=self.config,
                init_method=self.config.init_method,
                bias=False,
                gather_output=not self.parallel_output,
                tp_group=self.pg_collection.tp,
            )
            self.setup_embeddings_and_output_layer()

    def _postprocess(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor | None,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        """Megatron's, but for the losses `[batch, sequence]` of the last stage."""
        if labels is None or self.loss_chunk is None or not self.post_process:
            whole: Tensor = super()._postprocess(
                hidden_states, input_ids, position_ids, labels, *rest, **options
            )
            return whole
        losses: Tensor = self.output_layer(hidden_states, labels=labels.T, chunk=self.loss_chunk)
        return losses.T.contiguous()
