"""QK-clip: bounded attention logits by scaled query and key weights.

Source: "Kimi K2: Open Agentic Intelligence", section 2.1 (MuonClip). Use QK-clip with Muon, under
which the spectral norms of these weights may grow. Rules with a radius undo the clipping at their
next step.
"""

import torch
from torch import Tensor

from .local_part import placed_as


@torch.no_grad()
def clip_qk_(
    query: Tensor, key: Tensor, logits: Tensor, *, threshold: float = 100.0, balance: float = 0.5
) -> Tensor:
    """Scale queries and keys in place so that no logit exceeds `threshold`. Return the factors.

    Call this function after `optimizer.step()`. Heads that share a key share a factor: `threshold`
    divided by the heads' largest logit if this logit is finite and exceeds `threshold`, else 1.
    Weights may be DTensors.

    Args:
        query, key: weights `[heads size, inputs]` and `[groups size, inputs]`, or biases.
        logits: `[heads]`, a plain tensor: the largest logit of each head in the last step, before
            softmax, over all ranks; or an upper bound, such as the product of the largest norms of
            a head's queries and keys divided by the root of the head dimension.
        threshold: largest allowed logit; positive.
        balance: exponent of the factor for queries, in [0, 1]; the exponent for keys is
            `1 - balance`.

    Returns:
        The factor of the logits of each key `[groups]`.

    Raises:
        ValueError: if heads do not divide the rows of both weights, `logits` is not 1-d, query and
            key are the same weight, `threshold` is not positive, or `balance` is outside [0, 1].
    """
    if logits.ndim != 1:
        raise ValueError(f"logits must have one number per head, got shape {tuple(logits.shape)}")
    if query is key:
        raise ValueError(
            "query and key are the same weight: pass the rows of queries and the rows of keys of a "
            "fused weight, such as weight[:n] and weight[n : 2 * n]"
        )
    heads, rows = len(logits), query.shape[0]
    size = rows // max(heads, 1)
    groups = key.shape[0] // max(size, 1)
    if not groups or (size * heads, size * groups, heads % groups) != (rows, key.shape[0], 0):
        raise ValueError(
            f"query must have {heads} heads, and key must have heads of the same size; the number "
            f"of key heads must divide {heads}, got {rows} and {key.shape[0]} rows"
        )
    if not (threshold > 0 and 0 <= balance <= 1):
        raise ValueError(
            f"threshold must be positive and balance in [0, 1], got {threshold} and {balance}"
        )
    largest = logits.view(groups, -1).amax(1)
    factor = torch.where((largest > threshold) & largest.isfinite(), threshold / largest, 1)
    for weight, part in ((query, balance), (key, 1 - balance)):
        scale = (factor**part).repeat_interleave(weight.shape[0] // groups)
        scale = scale.view(-1, *(1,) * (weight.ndim - 1)).expand(weight.shape)
        weight.copy_(weight * placed_as(scale, weight))
    return factor
