"""Copies and sums of many tensors at a time, in few launches."""

from collections.abc import Iterable

import torch
from torch import Tensor


def copy_all_(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy to the first of each pair from the second; launched together."""
    targets, sources = _lists(pairs)
    if targets:
        torch._foreach_copy_(targets, sources)


def add_all_(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Add to the first of each pair the second, of the same dtype; launched together."""
    targets, sources = _lists(pairs)
    if targets:
        torch._foreach_add_(targets, sources)


def _lists(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    found = list(pairs)
    return [one for one, _ in found], [other for _, other in found]
