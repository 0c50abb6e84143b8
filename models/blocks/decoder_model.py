"""Decoder input and output: a scaled embedding, and logits or per-token losses.

Logits can be soft-capped. The z-loss uses the squared log-sum-exp of each token's logits.

The logits of a micro-batch are `[tokens, vocabulary]`. In a model with a large vocabulary, the
float32 logits and the softmax saved for backward are by far the largest activations. The chunked
loss processes the vocabulary in chunks, with a running maximum and sum (M. Milakov and N.
Gimelshein, "Online normalizer calculation for softmax", 2018). The backward pass recomputes each
chunk's logits, at the cost of one more matmul with the head. With tensor parallelism, every rank
processes its own part of the vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from models.blocks.attention import Documents


def softcap_(x: Tensor, cap: float | None) -> Tensor:
    """Overwrite `x` with `cap * tanh(x / cap)`, unless `cap` is None, and return `x`.

    Source: "Gemma 2: Improving Open Language Models at a Practical Size", section 2.
    """
    return x if cap is None else x.div_(cap).tanh_().mul_(cap)


def losses_and_normalizers(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk: int,
    group: ProcessGroup | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss `-log softmax(logits)[label]` and the log-sum-exp of the logits for each
    token.

    Both results are `[tokens]`, in float32 or wider. The logits are `hidden weight^T`, soft-capped.

    Args:
        hidden: `[tokens, width]`. The caller must sum the gradient of `hidden` over `group`.
        weight: `[rows, width]`, this rank's rows of the head.
        labels: `[tokens]`, the row of each label in `weight`; indices outside `weight` refer to
            rows on other ranks.
        chunk: number of vocabulary rows to process at a time.
        group: ranks that share the vocabulary, or None if this rank holds all of it.
        softcap: soft cap on the logits, or None.
    """
    both: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, chunk, group, softcap
    )
    return both


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        group: ProcessGroup | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        highest = hidden.new_full((len(hidden),), float("-inf"), dtype=wide)
        total, chosen = torch.zeros_like(highest), torch.zeros_like(highest)
        for rows, here in _chunks(weight, labels, chunk):
            logits = softcap_((hidden @ rows.T).to(wide), softcap)
            chosen += logits.gather(1, here.clamp(0, len(rows) - 1)[:, None])[:, 0].where(
                _inside(here, rows), 0
            )
            higher = torch.maximum(highest, logits.amax(1))
            total *= (highest - higher).exp()
            total += logits.sub_(higher[:, None]).exp_().sum(1)
            highest = higher
        if group is not None:
            local_highest = highest.clone()
            all_reduce(highest, ReduceOp.MAX, group)
            sums = torch.stack((total * (local_highest - highest).exp(), chosen))
            all_reduce(sums, ReduceOp.SUM, group)
            total, chosen = sums
        normalizer = highest + total.log()
        ctx.save_for_backward(hidden, weight, labels, normalizer)
        ctx.chunk, ctx.softcap = chunk, softcap
        ctx.set_materialize_grads(False)
        return normalizer - chosen, normalizer

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, of_normalizer: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, normalizer = ctx.saved_tensors
        gradient = torch.zeros_like(normalizer) if gradient is None else gradient
        hidden_gradient = torch.zeros_like(hidden, dtype=normalizer.dtype)
        weight_gradient = torch.empty_like(weight)
        targets = torch.split(weight_gradient, ctx.chunk)
        for (rows, here), target in zip(_chunks(weight, labels, ctx.chunk), targets, strict=True):
            # All intermediate results are named p, so that no other name keeps a chunk's logits
            # alive.
            p = softcap_((hidden @ rows.T).to(normalizer.dtype), ctx.softcap)
            slope = None if ctx.softcap is None else 1 - (p / ctx.softcap).square_()
            p = p.sub_(normalizer[:, None]).exp_()
            index = here.clamp(0, len(rows) - 1)[:, None]
            chosen = _inside(here, rows).to(p.dtype)[:, None]
            if of_normalizer is None:
                p = p.scatter_add_(1, index, -chosen).mul_(gradient[:, None])
            else:
                p = p.mul_((gradient + of_normalizer)[:, None])
                p = p.scatter_add_(1, index, -chosen * gradient[:, None])
            p = (p if slope is None else p.mul_(slope)).to(hidden.dtype)
            torch.mm(p.T, hidden, out=target)
            hidden_gradient += p @ rows
        return hidden_gradient.to(hidden.dtype), weight_gradient, None, None, None, None


def _chunks(weight: Tensor, labels: Tensor, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each chunk of rows of `weight`, with the labels relative to the chunk's first row."""
    for i, rows in enumerate(torch.split(weight, chunk)):
        yield rows, labels - i * chunk


def _inside(labels: Tensor, rows: Tensor) -> Tensor:
    return (labels >= 0) & (labels < len(rows))


class ScaledEmbedding(LanguageModelEmbedding):
    """Megatron's embedding, multiplied by sqrt(hidden size). As in transformers, this factor is
    rounded to the weights' dtype."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        scale = torch.tensor(self.config.hidden_size**0.5, dtype=self.config.params_dtype)
        self.scale = scale.item()

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        """Return the scaled embeddings `[s, b, hidden]` of token ids `[b, s]`. Under sequence
        parallelism, the output contains only this rank's part of the sequence."""
        embedded: Tensor = super().forward(*arguments, **options)
        return embedded * self.scale


class Head(ColumnParallelLinear):
    """Megatron's output layer. Returns soft-capped logits or, if labels are given, losses."""

    def __init__(self, *arguments: Any, softcap: float | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.softcap = softcap

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        labels: Tensor | None = None,
        chunk: int = 0,
    ) -> Any:
        """Return the loss and the log-sum-exp of each token, both `[sequence, batch]`.

        The input contains hidden states `[sequence, batch, width]`. Under sequence parallelism,
        these are only this rank's part of the sequence. Without labels, return Megatron's logits
        and bias, with the logits soft-capped in float32 or wider.
        """
        if labels is None:
            logits, bias = super().forward(input_, weight, runtime_gather_output)
            if self.softcap is None:
                return logits, bias
            wide = torch.promote_types(logits.dtype, torch.float32)
            return self.softcap * torch.tanh(logits.to(wide) / self.softcap), bias
        group = self.tp_group
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(input_, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(input_, group=group)
        losses, normalizers = losses_and_normalizers(
            hidden.flatten(0, 1),
            self.weight if weight is None else weight,
            labels.flatten() - group.rank() * self.output_size_per_partition,
            chunk=chunk,
            group=group if group.size() > 1 else None,
            softcap=self.softcap,
        )
        return losses.view(labels.shape), normalizers.view(labels.shape)


class _ChosenLogits(torch.autograd.Function):
    """Return logits `[sequence, batch, rows]` and the logit of each label, `[sequence, batch]`.

    The backward pass adds the gradient of the label logits to the gradient of all logits. The
    addition is in place, because no other code uses the gradient of all logits. Autograd would make
    three more passes over the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        here = labels - group.rank() * logits.shape[-1]
        inside = (here >= 0) & (here < logits.shape[-1])
        index = here.where(inside, 0)[..., None]
        ctx.save_for_backward(index, inside)
        wide = torch.promote_types(logits.dtype, torch.float32)
        chosen = logits.gather(-1, index)[..., 0].to(wide).where(inside, 0)
        if group.size() > 1:
            all_reduce(chosen, group=group)
        # If `logits` itself were returned, autograd would make it a view, and the loss could not
        # overwrite it.
        return logits.detach(), chosen

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_chosen: Tensor) -> tuple[Tensor | None, ...]:
        index, inside = ctx.saved_tensors
        of_label = of_chosen.where(inside, 0).to(gradient.dtype)[..., None]
        return gradient.scatter_add_(-1, index, of_label), None, None


class DecoderModel(GPTModel):
    """Megatron's model with logits soft-capped at `softcap` (None: no cap).

    The loss processes `loss_chunk` entries of a rank's vocabulary at a time (None: all at once).
    With `fused_loss`, Liger's kernels compute the loss in two passes over the logits. Otherwise
    Megatron computes the loss, and every operation is a separate pass over the logits. With
    `z_loss`, the training output is `[2, batch, sequence]`: the losses and the squared log-sum-exp
    of each token's logits.
    """

    def __init__(
        self,
        *arguments: Any,
        softcap: float | None,
        loss_chunk: int | None = None,
        fused_loss: bool = False,
        z_loss: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.z_loss = z_loss
        self.loss_chunk = loss_chunk
        self.fused_loss = fused_loss
        if self.post_process and (loss_chunk is not None or softcap is not None):
            self.output_layer = Head(
                self.config.hidden_size,
                self.vocab_size,
                config=self.config,
                init_method=self.config.init_method,
                bias=False,
                gather_output=not self.parallel_output,
                skip_weight_param_allocation=self.pre_process
                and self.share_embeddings_and_output_weights,
                tp_group=self.pg_collection.tp,
                softcap=softcap,
            )
            self.setup_embeddings_and_output_layer()

    def _preprocess(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        """Return Megatron's result, with rotary positions that restart at each packed document."""
        hidden, turns, *rest = super()._preprocess(*arguments, **options)
        documents = options.get("packed_seq_params")
        if isinstance(documents, Documents):
            turns = self.rotary_pos_emb.of_documents(documents)
        return hidden, turns, *rest

    def _postprocess(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor | None,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        """Return Megatron's result or, on the last stage with a chunked loss, the losses."""
        if labels is None or self.loss_chunk is None or not self.post_process:
            whole: Tensor = super()._postprocess(
                hidden_states, input_ids, position_ids, labels, *rest, **options
            )
            return whole
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else None
        losses, normalizers = self.output_layer(
            hidden_states, weight, labels=labels.T, chunk=self.loss_chunk
        )
        return self._with_squares(losses.T.contiguous(), normalizers.T)

    def _is_in_embd_group(self) -> bool:
        """Return False, so that Megatron does not sync initial weights between the stages of a tied
        embedding: both stages draw identical weights, because the generator is seeded by name."""
        return False

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the float32 losses of `labels` `[batch, sequence]`, given `logits` `[sequence,
        batch, rows]`."""
        if not (self.z_loss and self.training):
            return self._cross_entropy(labels, logits)
        # Gather the label logits before the loss, which may overwrite the logits.
        logits, chosen = _ChosenLogits.apply(  # type: ignore[no-untyped-call]
            logits, labels.T, self.pg_collection.tp
        )
        losses = self._cross_entropy(labels, logits)
        return self._with_squares(losses, losses + chosen.T)

    def _with_squares(self, losses: Tensor, normalizers: Tensor) -> Tensor:
        if not (self.z_loss and self.training):
            return losses
        return torch.stack((losses, normalizers.square()))

    def _cross_entropy(self, labels: Tensor, logits: Tensor) -> Tensor:
        if not self.fused_loss:
            whole: Tensor = super().compute_language_model_loss(labels, logits)
            return whole
        from liger_kernel.megatron import LigerMegatronCrossEntropy

        losses: Tensor = LigerMegatronCrossEntropy()(logits, labels.T, self.pg_collection.tp)
        return losses.T.contiguous()
