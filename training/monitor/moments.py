"""Sums over the entries of matrices, the basis of their figures.

They are computed in float64, a few million entries at a time, so that the figures of a large
embedding take little memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from spectral import measures

BLOCK: Final = 2**22
"""Number of a stack's entries that are in float64 at a time."""


@dataclass(frozen=True)
class Moments:
    """Sums over the entries of matrices `[units, rows, cols]`, float64.

    gram           `[units, n, n]`, the smaller of W W^T and W^T W
    total          `[units]`, sum of the entries
    off_diagonal   `[units]`, ||W^T W - Diag(W^T W)||_F^2
    entries        number of entries of a matrix
    """

    gram: Tensor
    total: Tensor
    off_diagonal: Tensor
    entries: int

    def singular_values(self) -> Tensor:
        """Compute the singular values `[units, n]`, descending."""
        return measures.eigenvalue_roots(self.gram)

    def mean_square(self) -> Tensor:
        """Compute the mean square `[units]` of the entries."""
        return self.gram.diagonal(dim1=-2, dim2=-1).sum(-1) / self.entries

    def rms(self) -> Tensor:
        """Compute the root mean square `[units]` of the entries."""
        return self.mean_square().sqrt()

    def correlation(self) -> Tensor:
        """Estimate the correlation `[units]` of the entries; see `measures.correlation`."""
        return measures.correlation_of(self.total / self.entries, self.mean_square(), self.entries)


def moments(blocks: Iterable[Tensor], shape: Sequence[int]) -> Moments:
    """Return the moments of matrices of `shape` `[units, rows, cols]`, given as the float64
    `blocks` of `split`."""
    _, rows, cols = shape
    if rows >= cols:
        gram, total = summed([x.mT @ x, x.sum((1, 2))] for x in blocks)
        off_diagonal = 2 * gram.triu(1).square().sum((1, 2))
    else:
        gram, total, fourth = summed(
            [x @ x.mT, x.sum((1, 2)), x.square().sum(1).square().sum(1)] for x in blocks
        )
        # Exact up to rounding of the first term; smaller values are zero.
        whole = gram.square().sum((1, 2))
        present = whole - fourth > 4 * torch.finfo(whole.dtype).eps * whole
        off_diagonal = torch.where(present | whole.isnan(), whole - fourth, 0)
    return Moments(gram, total, off_diagonal, rows * cols)


def of_matrices(stack: Tensor) -> Moments:
    """Return the moments of matrices `[units, rows, cols]`."""
    return moments((block.double() for block in split(stack)), stack.shape)


def split(stack: Tensor) -> Iterator[Tensor]:
    """Yield matrices `[units, rows, cols]` in blocks of rows, or of columns if they are wide."""
    units, rows, cols = stack.shape
    size = max(1, BLOCK // (units * min(rows, cols)))
    yield from stack.split(size, 1 if rows >= cols else 2)


def cosine(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Compute the cosine `[units]` of two stacks, given as float64 blocks; 0 if one is zero."""
    dot, one, other = summed(
        [(x * y).sum((1, 2)) for x, y in ((a, b), (a, a), (b, b))] for a, b in pairs
    )
    norms = one.sqrt() * other.sqrt()
    return torch.where(norms == 0, 0, dot / torch.where(norms == 0, 1, norms)).clamp(-1, 1)


def summed(terms: Iterable[list[Tensor]]) -> list[Tensor]:
    """Sum lists of tensors elementwise into the first list."""
    totals: list[Tensor] = []
    for sums in terms:
        if not totals:
            totals = sums
            continue
        for total, more in zip(totals, sums, strict=True):
            total += more
    return totals
