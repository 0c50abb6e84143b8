"""Block Golub-Kahan bidiagonalisation, batched, without a host sync.

Vectors are stored as rows: on every device a product of a few rows with a matrix is a plain GEMM
that reads the matrix once, while a product with a few columns is several times slower on CPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Bidiagonal(NamedTuple):
    """`Q M = L P` for a stack of matrices `M` `[batch, rows, cols]`, with 2 x 2 blocks in `L`."""

    left: Tensor  # [batch, 2 steps, rows], Q, orthonormal or zero rows
    right: Tensor  # [batch, 2 steps, cols], P, orthonormal or zero rows
    diagonal: Tensor  # [batch, steps, 2, 2], blocks L[j, j]
    lower: Tensor  # [batch, steps - 1, 2, 2], blocks L[j + 1, j]


def bidiagonalize(
    m: Tensor, first: Tensor, second: Tensor, steps: int, *, null: Tensor | None = None
) -> Bidiagonal:
    """Project each `m` `[batch, rows, cols]` on the block Krylov space of two start vectors.

    The singular values of `L` are those of a matrix within rounding of the projection, even the
    small ones, because nothing is squared. The left side is fully reorthogonalised, which keeps the
    right side orthogonal too (Simon and Zha, "Low-rank matrix approximation using the Lanczos
    bidiagonalization process", 2000). Where the space is exhausted (dependent start vectors, low
    rank, `2 steps > rows`) rows of Q and P are zero and contribute nothing to what follows.

    Args:
        m: matrices `[batch, rows, cols]`.
        first, second: start vectors `[batch, rows]`, which the first left block spans.
        steps: number of block steps, at least 1.
        null: unit vectors `[batch, cols]`; if given, the projection is that of
            `M (I - null null^T)`.
    """
    batch, rows, cols = m.shape
    left = m.new_zeros(batch, 2 * steps, rows)
    right = m.new_zeros(batch, 2 * steps, cols)
    diagonal, lower = m.new_zeros(batch, steps, 2, 2), m.new_zeros(batch, max(steps - 1, 0), 2, 2)
    block = torch.stack((first, second), dim=1)  # [batch, 2, rows]
    for step in range(steps):
        here, before = slice(2 * step, 2 * step + 2), slice(2 * step - 2, 2 * step)
        q = _orthonormal(block, left[:, : 2 * step])
        left[:, here] = q
        if step:
            lower[:, step - 1] = q @ block.mT
        image = q @ m  # [batch, 2, cols]
        known = right[:, before] if step else right[:, :0]
        p = _orthonormal(image, known if null is None else torch.cat((known, null[:, None]), 1))
        right[:, here] = p
        diagonal[:, step] = image @ p.mT
        if step + 1 < steps:
            block = p @ m.mT
    return Bidiagonal(left, right, diagonal, lower)


class Tridiagonal(NamedTuple):
    """`Q G Q^T` for a stack of symmetric matrices `G` `[batch, rows, rows]`, in 2 x 2 blocks."""

    left: Tensor  # [batch, 2 steps, rows], Q, orthonormal or zero rows
    diagonal: Tensor  # [batch, steps, 2, 2]
    lower: Tensor  # [batch, steps - 1, 2, 2], blocks [j + 1, j]


def tridiagonalize(gram: Tensor, first: Tensor, second: Tensor, steps: int) -> Tridiagonal:
    """Project each symmetric `gram` `[batch, rows, rows]` on the space of two start vectors.

    `first` and `second` are `[batch, rows]`. Fully reorthogonalised. Meant for float64 Gram
    matrices: in float32 squaring loses the singular values below 3e-4 of the largest.
    """
    batch, rows, _ = gram.shape
    left = gram.new_zeros(batch, 2 * steps, rows)
    diagonal, lower = gram.new_zeros(batch, steps, 2, 2), gram.new_zeros(batch, steps - 1, 2, 2)
    block = torch.stack((first, second), dim=1)  # [batch, 2, rows]
    for step in range(steps):
        q = _orthonormal(block, left[:, : 2 * step])
        left[:, 2 * step : 2 * step + 2] = q
        if step:
            lower[:, step - 1] = q @ block.mT
        block = q @ gram
        diagonal[:, step] = block @ q.mT
    return Tridiagonal(left, diagonal, lower)


def _orthonormal(block: Tensor, basis: Tensor) -> Tensor:
    """Orthonormalise the two rows of `block` `[batch, 2, n]` against `basis` and each other.

    A row of which only rounding is left becomes zero.
    """
    block = unit(block)
    for _ in range(2):
        block = block - (block @ basis.mT) @ basis
    one = _unit_or_zero(block[:, 0])
    two = _unit_or_zero(_without(_without(block[:, 1], one), one))
    # Normalising a small remainder magnifies its component in the basis: project once more.
    block = torch.stack((one, two), dim=1)
    block = _unit(block - (block @ basis.mT) @ basis)
    return torch.stack((block[:, 0], _unit(_without(block[:, 1], block[:, 0]))), dim=1)


def _without(x: Tensor, direction: Tensor) -> Tensor:
    return x - direction * (direction * x).sum(-1, keepdim=True)


def unit(x: Tensor) -> Tensor:
    """Normalise `x` `[..., n]` to unit length; zero stays zero."""
    # Summed in float64: squares of float32 overflow from 1.8e19 on and vanish below 1e-23.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
    return x / torch.where(norm == 0, 1, norm).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    """`unit` of vectors that are of about that length already, without the wide sum."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(norm == 0, 1, norm)


def _unit_or_zero(x: Tensor) -> Tensor:
    """Normalise `x` `[batch, n]`, what is left of unit vectors; zero where that is rounding."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    alive = norm > 32 * torch.finfo(x.dtype).eps
    return torch.where(alive, x / torch.where(alive, norm, 1), 0)
