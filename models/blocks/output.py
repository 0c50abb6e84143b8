"""The end of a decoder: logits, capped or not, or the loss of each token, with a z-loss also the
squared log-sum-exp of its logits."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce

from models.blocks.chunked_loss import losses_and_normalizers
from models.blocks.softcap import softcapped
from models.documents import Documents


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
        """Return the loss and the log-sum-exp of each token, both `[sequence, batch]`, of hidden
        states `[sequence, batch, width]` (a part of the sequence with sequence parallelism), or
        without labels what Megatron returns, the logits capped in float32."""
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
    """Logits `[sequence, batch, rows]` as they are, and that of each label, `[sequence, batch]`.

    Backward adds the labels' gradient to that of the logits in place, which the loss has just made
    and nobody else reads: autograd itself would take three more passes over the logits.
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
        # Not `logits`, of which autograd would make a view, and the loss may write over it.
        return logits.detach(), chosen

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_chosen: Tensor) -> tuple[Tensor | None, ...]:
        index, inside = ctx.saved_tensors
        own = of_chosen.where(inside, 0).to(gradient.dtype)[..., None]
        return gradient.scatter_add_(-1, index, own), None, None


class DecoderModel(GPTModel):
    """Megatron's model with logits capped at `softcap`, None for no cap.

    Its loss takes `loss_chunk` entries of a rank's vocabulary at a time, or, where that is None,
    all of them: with `fused_loss` by Liger's kernels, which read the logits twice, else in
    Megatron's own way, a pass over them for every operation. With `z_loss` training gets `[2,
    batch, sequence]`: the losses, and the squared log-sum-exp of each token's logits.
    """

    def __init__(
        self,
        *arguments: Any,
        loss_chunk: int | None,
        fused_loss: bool,
        softcap: float | None,
        z_loss: bool,
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
        """As Megatron's, with the rotary turns of positions in documents where there are some."""
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
        """As Megatron's, but for the losses of the last stage."""
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
        """Return False, so that the engine sends no initial weights between the stages of a tied
        embedding: they are drawn by its name, the same on both."""
        return False

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the losses, float32, of `labels` `[batch, sequence]` under `logits` `[sequence,
        batch, rows]`."""
        if not (self.z_loss and self.training):
            return self._cross_entropy(labels, logits)
        # Before the loss, which may write over the logits.
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
