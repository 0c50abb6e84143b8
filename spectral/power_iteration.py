"""Top singular triplets tracked from step to step, batched, without a host sync.

Each call is a short block Krylov iteration from the cached vector and one fixed generic vector,
followed by Rayleigh-Ritz, which takes the best vector of the space. A step costs two products with
a block of two columns, as a power iteration with two vectors would, and converges with the square
root of the spectral gap. The generic vector finds directions orthogonal to the cached one.
"""

from functools import lru_cache

import torch
from torch import Tensor

from . import kernels
from .constant_result import constant_result
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
    work = w.to(torch.promote_types(w.dtype, torch.float32))
    start = _start(u.to(work.dtype))
    basis = krylov_basis(work, start, basis_size(w.shape[1], steps) // 2)
    image = torch.bmm(basis, work)  # [batch, k, cols]
    best = _best(basis.double(), image.double())[:, None].to(work.dtype)  # [batch, 1, k]
    left, right = torch.bmm(best, basis)[:, 0], torch.bmm(best, image)[:, 0]
    # Summed in float64, in which the squares of no float32 overflow.
    length, size = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64) for x in (left, right))
    # Both vectors of a zero matrix are zero already.
    sigma = size / length.clamp_(min=TINY)
    left, right = left.div_(length[:, None]), right.div_(size.clamp_(min=TINY)[:, None])
    return sigma.to(w.dtype), left.to(w.dtype), right.to(w.dtype)


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


def _best(basis: Tensor, image: Tensor) -> Tensor:
    """Compute `[batch, k]`, the coordinates of the vector whose image is longest.

    `basis` is `[batch, k, rows]`, of rows that are nearly orthonormal or zero, `image`
    `[batch, k, cols]`; both float64.
    """
    gram = torch.bmm(basis, basis.mT)
    gram.diagonal(dim1=-2, dim2=-1).add_(RIDGE)
    factor = torch.linalg.cholesky_ex(gram).L
    square = torch.linalg.solve_triangular(factor, torch.bmm(image, image.mT), upper=False)
    best = _top_eigenvector(torch.linalg.solve_triangular(factor, square.mT, upper=False))
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
