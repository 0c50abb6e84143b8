"""The end of a decoder: logits, capped or not, or the loss of each token."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from models.blocks.chunked_loss import linear_cross_entropy
from models.blocks.softcap import softcapped


class Head(ColumnParallelLinear):
    """Megatron's output layer with capped logits, which given labels returns losses."""

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
        """Return the loss of each token `[sequence, batch]` of hidden states `[sequence, batch,
        width]` (a part of the sequence with sequence parallelism), or without labels what Megatron
        returns, the logits capped in float32."""
        if labels is None:
            logits, bias = super().forward(input_, weight, runtime_gather_output)
            if self.softcap is None:
                return logits, bias
            wide = torch.promote_types(logits.dtype, torch.float32)
            return softcapped(logits.to(wide), self.softcap), bias
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
            softcap=self.softcap,
        )
        return losses.view(labels.shape)


class DecoderModel(GPTModel):
    """Megatron's model with logits capped at `softcap`, None for no cap.

    Its loss takes `loss_chunk` entries of a rank's vocabulary at a time, or, where that is None,
    all of them: with `fused_loss` by Liger's kernels, which read the logits twice, else in
    Megatron's own way, a pass over them for every operation.
    """

    def __init__(
        self,
        *arguments: Any,
        loss_chunk: int | None,
        fused_loss: bool,
        softcap: float | None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
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
                tp_group=self.pg_collection.tp,
                softcap=softcap,
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
        """As Megatron's, but for the losses `[batch, sequence]` of the last stage."""
        if labels is None or self.loss_chunk is None or not self.post_process:
            whole: Tensor = super()._postprocess(
                hidden_states, input_ids, position_ids, labels, *rest, **options
            )
            return whole
        losses: Tensor = self.output_layer(hidden_states, labels=labels.T, chunk=self.loss_chunk)
        return losses.T.contiguous()

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the losses `[batch, sequence]`, float32, of `labels` under `logits` `[sequence,
        batch, rows]`."""
        if not self.fused_loss:
            whole: Tensor = super().compute_language_model_loss(labels, logits)
            return whole
        from liger_kernel.megatron import LigerMegatronCrossEntropy

        losses: Tensor = LigerMegatronCrossEntropy()(logits, labels.T, self.pg_collection.tp)
        return losses.T.contiguous()
