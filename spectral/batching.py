"""Helpers for grouping items, batching stacks with equal row counts, and fusing copies.

Stacks whose matrices have the same number of rows but different numbers of columns form one batch.
Quantities whose shape does not depend on the number of columns are computed once for all stacks, as
a tensor `[sum of batches, ...]`. Matmuls with the matrices themselves, `[batch, rows, cols]`, are
launched once per stack.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from .device_values import constant

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Group items by key, with keys in order of first appearance."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def concat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors `[batch, ...]`, one per stack, into `[sum of batches, ...]`."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def split_like(x: Tensor, stacks: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Split `x` `[sum of batches, ...]` into views, one `[batch, ...]` per stack."""
    return (x,) if len(stacks) == 1 else torch.split(x, [len(stack) for stack in stacks])


def split_figures(
    figures: Mapping[str, Tensor], stacks: Sequence[Tensor]
) -> list[dict[str, Tensor]]:
    """Split `[sum of batches]` values, one per matrix, into one tensor per stack."""
    columns = [split_like(figure, stacks) for figure in figures.values()]
    return [dict(zip(figures, row, strict=True)) for row in zip(*columns, strict=True)]


def images(x: Tensor, stacks: Sequence[Tensor]) -> list[Tensor]:
    """Compute `X W` `[batch, vectors, cols]` for each stack W. `x` is `[..., vectors, rows]`."""
    return [torch.bmm(part, w) for part, w in zip(split_like(x, stacks), stacks, strict=True)]


def preimages(products: Sequence[Tensor], stacks: Sequence[Tensor]) -> Tensor:
    """Compute `Y W^T` `[sum of batches, vectors, rows]` from each `Y` `[batch, vectors, cols]`."""
    if len(stacks) == 1:
        return torch.bmm(products[0], stacks[0].mT)
    count = sum(len(stack) for stack in stacks)
    result = products[0].new_empty(count, products[0].shape[1], stacks[0].shape[1])
    for y, w, part in zip(products, stacks, split_like(result, stacks), strict=True):
        torch.bmm(y, w.mT, out=part)
    return result


def numbers(values: Sequence[float], stacks: Sequence[Tensor]) -> Tensor:
    """Repeat each stack's value once per matrix in the stack, `[sum of batches]`.

    The result has the dtype and device of the stacks and must not be modified.
    """
    repeated = ((value,) * len(stack) for value, stack in zip(values, stacks, strict=True))
    return constant(tuple(chain.from_iterable(repeated)), stacks[0].dtype, stacks[0].device)


Pairs = Iterable[tuple[Tensor, Tensor]]


def copy_all_(pairs: Pairs) -> None:
    """Copy the second tensor of each pair to the first tensor, using few kernel launches."""
    if lists := [*zip(*pairs, strict=True)]:
        targets, sources = lists
        torch._foreach_copy_(targets, sources)


def add_all_(pairs: Pairs) -> None:
    """Add the second tensor of each pair to the first tensor, using few kernel launches. Dtypes
    must match."""
    if lists := [*zip(*pairs, strict=True)]:
        targets, terms = lists
        torch._foreach_add_(targets, terms)
