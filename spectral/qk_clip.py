"""QK-clip: bounds attention logits by scaling down query and key weights.

Source: "Kimi K2: Open Agentic Intelligence", section 2.1 (MuonClip). Use QK-clip with Muon, because
Muon does not limit the spectral norms of query and key weights. Rules with a radius undo the
clipping in their next step.
"""

import torch
from torch import Tensor

from .local_part import placed_as


@torch.no_grad()
def clip_qk_(
    query: Tensor, key: Tensor, logits: Tensor, *, threshold: float = 100.0, balance: float = 0.5
) -> Tensor:
    """Scale queries and keys in place so that no logit exceeds `threshold`. Return the factors.

    Call this function after `optimizer.step()`. Heads that share a key share a factor. If the
    largest logit of these heads is finite and exceeds `threshold`, the factor is `threshold`
    divided by this logit; otherwise, the factor is 1. Weights may be DTensors.

    Args:
        query, key: weights `[heads size, inputs]` and `[groups size, inputs]`, or biases.
        logits: `[heads]`, a plain tensor: each head's largest pre-softmax logit in the last step,
            across all ranks. Upper bounds are also allowed, such as a head's largest query norm
            times its largest key norm, divided by the square root of the head dimension.
        threshold: maximum allowed logit; must be positive.
        balance: exponent of the factor for queries, in [0, 1]; the exponent for keys is
            `1 - balance`.

    Returns:
        The factor by which the logits of each key are scaled, `[groups]`.

    Raises:
        ValueError: if the number of heads does not divide the rows of both weights, `logits` is not
            1-d, query and key are the same weight, `threshold` is not positive, or `balance` is
            outside [0, 1].
    """
    if logits.ndim != 1:
        raise ValueError(f"logits must have one number per head, got shape {tuple(logits.shape)}")
    if query is key:
        raise ValueError(
            "query and key must not be the same weight; for a fused weight, pass the query rows "
            "and the key rows separately, such as weight[:n] and weight[n : 2 * n]"
        )
    heads, rows = len(logits), query.shape[0]
    size = rows // max(heads, 1)
    groups = key.shape[0] // max(size, 1)
    if not groups or (size * heads, size * groups, heads % groups) != (rows, key.shape[0], 0):
        raise ValueError(
            f"query must have {heads} heads of equal size, key must have heads of the same size, "
            f"and the number of key heads must divide {heads}; got {rows} query rows and "
            f"{key.shape[0]} key rows"
        )
    if not (threshold > 0 and 0 <= balance <= 1):
        raise ValueError(
            "threshold must be positive and balance must be in [0, 1], got threshold "
            f"{threshold} and balance {balance}"
        )
    largest = logits.view(groups, -1).amax(1)
    factor = torch.where((largest > threshold) & largest.isfinite(), threshold / largest, 1)
    for weight, part in ((query, balance), (key, 1 - balance)):
        scale = (factor**part).repeat_interleave(weight.shape[0] // groups)
        scale = scale.view(-1, *(1,) * (weight.ndim - 1)).expand(weight.shape)
        weight.copy_(weight * placed_as(scale, weight))
    return factor
