"""Top singular triplets tracked from step to step, batched, without a host sync.

Each call is a short block Krylov iteration from the cached vector and one fixed generic vector,
followed by Rayleigh-Ritz, which takes the best vector of the space. A step costs two products with
a block of two columns, as a power iteration with two vectors would, and converges with the square
root of the spectral gap. The generic vector finds directions orthogonal to the cached one.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels
from .constant_result import constant_result
from .joined_stacks import apart, images, together
from .krylov import krylov_basis

COLD_STEPS = 48
SQUARINGS = (7, 7, 7)
"""Squarings of the projected matrix between its normalisations: float64 holds the 128th powers of
up to 200 x 200 matrices whose largest entry is 1. All together tell values 1e-6 apart."""
TINY = 1e-300
FAINT = 1e-20
"""Share of a fixed vector in the start: nothing beside a cached unit vector, all beside zero."""
RIDGE = 1e-7
"""Keeps the Gram matrix of a basis with zero rows positive, and what rounding left of dependent
ones from being magnified."""


def top_singular(
    w: Tensor, u: Tensor, v: Tensor, *, steps: int = 10
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the top singular triplet `(sigma, u, v)` of each matrix of `w`.

    The results are `[batch]`, `[batch, rows]` and `[batch, cols]`, in the dtype of `w`. `sigma`
    never exceeds the true norm by more than rounding. A zero matrix gives `sigma = 0` and zero
    vectors, so that `u v^T` is zero too.

    Args:
        w: matrices `[batch, rows, cols]` of any shape; half precision is computed in float32.
        u, v: vectors of the last call, `[batch, rows]` and `[batch, cols]`; zeros, or vectors
            orthogonal to the answer, make a cold start. Only the one on the shorter side is read.
        steps: number of block Krylov steps, each two passes over `w`. Ten suffice from the last
            optimizer step's vectors, `COLD_STEPS` for a cold start.

    Raises:
        ValueError: `steps < 1` or mismatched shapes.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if w.ndim != 3 or u.shape != w.shape[:2] or v.shape != (w.shape[0], w.shape[2]):
        shapes = tuple(map(tuple, (w.shape, u.shape, v.shape)))
        raise ValueError(f"w, u, v must be [b, rows, cols], [b, rows], [b, cols], got {shapes}")
    if w.shape[1] > w.shape[2]:
        sigma, v, u = top_singular(w.mT, v, u, steps=steps)
        return sigma, u, v
    sigma, left, (right,) = top_pairs([w], u, steps=steps)
    return sigma.to(w.dtype), left.to(w.dtype), right.to(w.dtype)


class TopPairs(NamedTuple):
    """Top singular values and vectors of stacks with one shorter side, in at least float32."""

    sigma: Tensor  # [matrices], of all stacks
    short: Tensor  # [matrices, rows]
    long: list[Tensor]  # [batch, cols], of each stack


def top_pairs(stacks: Sequence[Tensor], cached: Tensor, *, steps: int) -> TopPairs:
    """Compute `top_singular` of stacks together, with launches for each only where its columns are.

    Args:
        stacks: matrices `[batch, rows, cols]` each, `rows <= cols`, of the same rows.
        cached: short vectors of the last call, `[matrices, rows]`, as for `top_singular`.
        steps: number of block Krylov steps, at least 1.
    """
    work = [w.to(torch.promote_types(w.dtype, torch.float32)) for w in stacks]
    dtype = work[0].dtype
    basis = krylov_basis(work, _start(cached.to(dtype)), basis_size(cached.shape[1], steps) // 2)
    found = images(basis, work)  # [batch, k, cols] each
    square = together([_gram(image.double()) for image in found])
    best = _best(basis.double(), square)[:, None].to(dtype)  # [matrices, 1, k]
    short = torch.bmm(best, basis)[:, 0]
    long = [x[:, 0] for x in images(best, found)]
    length, size = _length(short), together([_length(x) for x in long])
    # Both vectors of a zero matrix are zero already.
    sigma = size / length.clamp_(min=TINY)
    short.div_(length[:, None])
    for x, each in zip(long, apart(size.clamp_(min=TINY)[:, None], work), strict=True):
        x.div_(each)
    return TopPairs(sigma.to(dtype), short, long)


def _gram(x: Tensor) -> Tensor:
    return torch.bmm(x, x.mT)


def _length(x: Tensor) -> Tensor:
    """Norms `[batch]` of `x` `[batch, n]` in float64, in which no square of float32 overflows."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    return length


def basis_size(rows: int, steps: int) -> int:
    """Return the number of basis vectors after `steps` block steps on a shorter side of `rows`."""
    return 2 * min(steps, (rows + 1) // 2 + 1)


def cold_start(w: Tensor, *, steps: int = COLD_STEPS) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the top triplet `(sigma, u, v)` of each `w` `[batch, rows, cols]` without cache."""
    return top_singular(
        w, w.new_zeros(w.shape[:2]), w.new_zeros(w.shape[0], w.shape[2]), steps=steps
    )


def _start(cached: Tensor) -> Tensor:
    """Return the start `[batch, 2, rows]` of an iteration: the `cached` vector and a fixed one.

    Without a cached vector (zero) they are two fixed ones, which span twice the space of one.
    """
    first, second = _generic(cached.shape[1], cached.dtype, cached.device)
    known = cached.nan_to_num(0, 0, 0).add_(first, alpha=FAINT)
    return torch.stack((known, second.expand_as(known)), dim=1)


def _best(basis: Tensor, square: Tensor) -> Tensor:
    """Compute `[batch, k]`, the coordinates of the vector whose image is longest.

    `basis` is `[batch, k, rows]`, of rows that are nearly orthonormal or zero, `square`
    `[batch, k, k]` the Gram matrix of their images; both float64.
    """
    gram = _gram(basis)
    gram.diagonal(dim1=-2, dim2=-1).add_(RIDGE)
    factor = torch.linalg.cholesky_ex(gram).L
    half = torch.linalg.solve_triangular(factor, square, upper=False)
    best = _top_eigenvector(torch.linalg.solve_triangular(factor, half.mT, upper=False))
    found: Tensor = torch.linalg.solve_triangular(factor.mT, best[:, :, None], upper=True)
    return found[:, :, 0]


@constant_result
def _generic(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return two fixed vectors without structure, `[2, size]`.

    Not random, so that a step depends on no generator state. Not constant, because rows that sum to
    zero (centred weights) are orthogonal to a constant vector.
    """
    return _generic_on(size, dtype, device)


@lru_cache
def _generic_on(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    index = torch.arange(1, size + 1, dtype=torch.float64, device=device)
    waves = torch.stack((index * 43.7581, index * 78.233))
    return torch.frac(torch.sin(waves) * 43758.5453).to(dtype)


def _top_eigenvector(t: Tensor) -> Tensor:
    """Compute the top eigenvector `[batch, k]` of positive `t` `[batch, k, k]`, float64.

    Squarings amount to 2^21 power iterations, without an eigensolver or a host sync.
    """
    found = kernels.top_eigenvector(t, SQUARINGS, TINY)
    if found is not None:
        return found
    for count in SQUARINGS:
        t = t / t.amax((-2, -1), keepdim=True).clamp_(min=TINY)
        for _ in range(count):
            t = torch.bmm(t, t)
    column = t.diagonal(dim1=-2, dim2=-1).argmax(-1)  # all columns are parallel: take the longest
    best = t.gather(2, column[:, None, None].expand(-1, t.shape[1], 1))[:, :, 0]
    norm: Tensor = torch.linalg.vector_norm(best, dim=-1, keepdim=True)
    return best / norm.clamp_(min=TINY)
