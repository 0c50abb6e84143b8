"""Logits and attention scores that are kept below a cap by a tanh."""

import torch
from torch import Tensor


def softcapped(x: Tensor, cap: float | None) -> Tensor:
    """Return `cap * tanh(x / cap)`, elementwise, or `x` itself without a cap.

    Source: "Gemma 2: Improving Open Language Models at a Practical Size", section 2.
    """
    return x if cap is None else cap * torch.tanh(x / cap)


def softcap_(x: Tensor, cap: float | None) -> Tensor:
    """Return `x`, which now is `softcapped(x, cap)`."""
    return x if cap is None else x.div_(cap).tanh_().mul_(cap)
