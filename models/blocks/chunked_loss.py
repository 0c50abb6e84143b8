"""The loss of each token from hidden states and head, without all logits at any time.

Logits of one micro-batch are `[tokens, vocabulary]`: in float32, with the softmax that backward
needs, they are by far the largest activations of a model with a large vocabulary. Here the
vocabulary is passed in chunks, with a running maximum and sum (M. Milakov and N. Gimelshein,
"Online normalizer calculation for softmax", 2018); backward computes each chunk's logits once more,
and so one more product with the head. With tensor parallelism every rank passes its own part.
Logits may be capped, `c * tanh(logit / c)`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from models.blocks.softcap import softcap_


def losses_and_normalizers(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk: int,
    group: ProcessGroup | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `-log softmax(softcapped(hidden weight^T))[label]` of each token, and the log-sum-exp
    of its logits, both `[tokens]`, float32 or wider.

    Args:
        hidden: `[tokens, width]`. Its gradient is this rank's part of a sum over `group`.
        weight: `[rows, width]`, this rank's rows of the head.
        labels: `[tokens]`, row of `weight`; any other number if the row is on another rank.
        chunk: rows whose logits exist at a time.
        group: ranks that share the vocabulary, None if this one has it all.
        softcap: cap of the logits, None for none.

    Raises ValueError unless `chunk >= 1`.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
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
            own = highest.clone()
            all_reduce(highest, ReduceOp.MAX, group)
            sums = torch.stack((total * (own - highest).exp(), chosen))
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
            # One name throughout, so that no chunk's logits outlive their gradient.
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
    """Yield successive rows of `weight`, and the labels counted from the first of them."""
    for i, rows in enumerate(torch.split(weight, chunk)):
        yield rows, labels - i * chunk


def _inside(labels: Tensor, rows: Tensor) -> Tensor:
    return (labels >= 0) & (labels < len(rows))
