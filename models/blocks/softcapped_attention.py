"""Attention with soft-capped scores and sliding windows, without fused kernels.

Scores are computed one block of queries at a time and never stored; the backward pass recomputes
them from the saved queries, keys and log-sum-exps. Matmuls take inputs in the model's dtype and
accumulate in float32. All intermediate values are float32 or wider. The same code runs on CPUs and
GPUs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.blocks.attention import (
    CoreAttention,
    DocumentRange,
    hidden_keys,
    largest_causal_score,
    other_documents,
    score_blocks,
)
from models.blocks.decoder_model import softcap_


class SoftcappedCoreAttention(CoreAttention):
    """Causal softmax(cap tanh(scale q k^T / cap)) v over the last `window` keys (None: all keys).

    Source: "Gemma 2: Improving Open Language Models at a Practical Size", section 2.
    """

    def __init__(
        self, *arguments: Any, softcap: float | None, window: int | None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.softcap = softcap
        self.window = window

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, documents: DocumentRange | None = None
    ) -> Tensor:
        """Return the output of `softcapped_attention`."""
        return softcapped_attention(
            query, key, value, self.scale, self.softcap, self.window, documents
        )

    def largest_score(self, query: Tensor, key: Tensor, documents: DocumentRange | None) -> Tensor:
        """Return the largest scaled score `[]` before the soft cap, excluding masked scores."""
        return largest_causal_score(query, key, self.scale, self.window, documents)


def softcapped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    cap: float | None = None,
    window: int | None = None,
    documents: DocumentRange | None = None,
) -> Tensor:
    """Return the attention output `[s, b, heads * d]` for queries at the last s of t positions.

    Args:
        query: `[s, b, heads, d]`.
        key, value: `[t, b, groups, d]`, t >= s.
        scale: multiplier for the scores.
        cap: soft cap on the scaled scores, or None.
        window: number of keys that a query attends to, including the one at its own position; None
            for all previous keys.
        documents: document boundaries, which attention does not cross; None: no boundaries.
    """
    groups = key.shape[2]
    q = query.permute(1, 2, 0, 3).unflatten(1, (groups, -1)).flatten(0, 1)  # [b g, n, s, d]
    k, v = (x.permute(1, 2, 0, 3).flatten(0, 1) for x in (key, value))  # [b g, t, d]
    out: Tensor = _SoftcappedAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, scale, cap, window, documents
    )
    return out.unflatten(0, (-1, groups)).flatten(1, 2).permute(2, 0, 1, 3).flatten(2)


class _SoftcappedAttention(torch.autograd.Function):
    """Soft-capped attention from queries `[batch, n, s, d]` to keys and values `[batch, t, d]`; n
    query heads share one KV head."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        cap: float | None,
        window: int | None,
        documents: DocumentRange | None,
    ) -> Tensor:
        (_, n, s, _), t = query.shape, key.shape[1]
        out = query.new_empty(*query.shape[:3], value.shape[-1])
        wide = torch.promote_types(query.dtype, torch.float32)
        normalizers = query.new_empty(*query.shape[:3], 1, dtype=wide)
        for rows, seen in score_blocks(s, t, window):
            scores = product(query[:, :, rows].flatten(1, 2), key[:, seen].mT).mul_(scale)
            scores = softcap_(scores, cap).unflatten(1, (n, -1))  # [batch, n, rows, keys]
            hidden = hidden_scores(scores, rows, seen, t - s, window, documents)
            scores.masked_fill_(hidden, -torch.inf)
            normalizers[:, :, rows] = scores.logsumexp(-1, keepdim=True)
            weights = scores.sub_(normalizers[:, :, rows]).exp_().to(value.dtype).flatten(1, 2)
            out[:, :, rows] = product(weights, value[:, seen]).unflatten(1, (n, -1)).to(out.dtype)
        ctx.save_for_backward(query, key, value, out, normalizers)
        ctx.constants = scale, cap, window, documents
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, normalizers = ctx.saved_tensors
        scale, cap, window, documents = ctx.constants
        (_, n, s, _), t, wide = query.shape, key.shape[1], normalizers.dtype
        # The softmax's gradient is p (dp - sum(p dp)), where sum(p dp) = sum(out * dout).
        shares = (gradient.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        of_query = torch.empty_like(query)
        of_key, of_value = (torch.zeros_like(x, dtype=wide) for x in (key, value))
        for rows, seen in score_blocks(s, t, window):
            q, upstream = (x[:, :, rows].flatten(1, 2) for x in (query, gradient))
            k, v = key[:, seen], value[:, seen]
            scores = softcap_(product(q, k.mT).mul_(scale), cap).unflatten(1, (n, -1))
            weights = (scores - normalizers[:, :, rows]).exp_()
            hidden = hidden_scores(scores, rows, seen, t - s, window, documents)
            weights.masked_fill_(hidden, 0.0)
            of_value[:, seen] += product(weights.to(v.dtype).flatten(1, 2).mT, upstream)
            change = product(upstream, v.mT).unflatten(1, (n, -1)).sub_(shares[:, :, rows])
            change = change.mul_(weights).mul_(scale)
            if cap is not None:  # the slope of the cap is 1 - (score / cap)^2
                change.addcmul_(change, scores.div_(cap).square_(), value=-1)
            change = change.to(q.dtype).flatten(1, 2)
            of_query[:, :, rows] = product(change, k).unflatten(1, (n, -1)).to(query.dtype)
            of_key[:, seen] += product(change.mT, q)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), *[None] * 4


def hidden_scores(
    scores: Tensor,
    rows: slice,
    seen: slice,
    offset: int,
    window: int | None,
    documents: DocumentRange | None,
) -> Tensor:
    """Return the mask of a block's excluded scores, broadcastable to `[batch, n, rows, keys]`. See
    `hidden_keys` and `other_documents` for the arguments."""
    hidden = hidden_keys(rows, seen, offset, window, scores.device)
    if documents is None:
        return hidden
    others = other_documents(rows, seen, documents)
    groups = len(scores) // len(others)
    return (hidden | others).repeat_interleave(groups, 0)[:, None]


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the batched matmul `a b`, accumulated and returned in float32 or wider."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(a, b, out_dtype=torch.float32)
    wide = torch.promote_types(a.dtype, torch.float32)
    return torch.bmm(a.to(wide), b.to(wide))
