"""Copies and sums of many tensors at a time, in few launches."""

from collections.abc import Iterable

import torch
from torch import Tensor

Pairs = Iterable[tuple[Tensor, Tensor]]


def copy_all_(pairs: Pairs) -> None:
    """Copy to the first of each pair from the second; launched together."""
    if lists := [*zip(*pairs, strict=True)]:
        targets, sources = lists
        torch._foreach_copy_(targets, sources)


def add_all_(pairs: Pairs) -> None:
    """Add to the first of each pair the second, of the same dtype; launched together."""
    if lists := [*zip(*pairs, strict=True)]:
        targets, terms = lists
        torch._foreach_add_(targets, terms)
