"""Streaming top singular triplets, batched, without a host sync.

Each call is a short block Krylov iteration from the remembered vector and one fixed generic vector,
ended by the best vector of the space (Rayleigh-Ritz). It costs two products with a two-column
block per step, as a power iteration with two vectors would, and converges with the square root of
the spectral gap. The generic vector finds a direction that the remembered one cannot see.
"""

import torch
from torch import Tensor

from spectral.krylov import Bidiagonal, bidiagonalize

COLD_STEPS = 48


def top_singular(
    w: Tensor, u: Tensor, v: Tensor, *, steps: int = 10
) -> tuple[Tensor, Tensor, Tensor]:
    """`(sigma, u, v)`: `[batch]`, `[batch, rows]`, `[batch, cols]`, the top triplet of each `w`.

    Args:
        w: `[batch, rows, cols]`, any shape, float32 or float64 (half precision is computed in
        float32).
        u, v: the vectors of the last call; zeros start cold, and so does a vector orthogonal to the
            answer. Only the one on the shorter side is read.
        steps: block Krylov steps, each two passes over `w`. Ten suffice from the last step's
        vector;
            `COLD_STEPS` from nothing.

    `sigma` never exceeds the true norm by more than rounding. A zero matrix gives `sigma = 0` and
    zero vectors, so that `u v^T` is zero too. Results have the dtype of `w`.

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
    start = u.to(work.dtype)
    # Nothing remembered: two generic vectors span twice the space of one.
    known = torch.linalg.vector_norm(start, dim=1, keepdim=True) > 0
    start = torch.where(known, start, _generic(start, 43.7581))
    projection = bidiagonalize(work, start, _generic(start), min(steps, (w.shape[1] + 1) // 2 + 1))
    factor = _dense(projection).double()  # [batch, k, k], Q W = L P
    best = _top_eigenvector(factor @ factor.mT)[:, None]  # [batch, 1, k]
    left = (best.to(work.dtype) @ projection.left)[:, 0]
    right = ((best @ factor).to(work.dtype) @ projection.right)[:, 0]
    sigma = torch.linalg.vector_norm(right, dim=-1)
    alive = (sigma > 0)[:, None]
    right = right / torch.where(alive, sigma[:, None], 1)
    left = torch.where(alive, left, 0)
    return sigma.to(w.dtype), left.to(w.dtype), right.to(w.dtype)


def cold_start(w: Tensor, *, steps: int = COLD_STEPS) -> tuple[Tensor, Tensor, Tensor]:
    """`(sigma, u, v)` of each `w` `[batch, rows, cols]` from no knowledge at all."""
    return top_singular(
        w, w.new_zeros(w.shape[:2]), w.new_zeros(w.shape[0], w.shape[2]), steps=steps
    )


def _dense(projection: Bidiagonal) -> Tensor:
    """`L` `[batch, 2 steps, 2 steps]` of the projection."""
    diagonal, lower = projection.diagonal, projection.lower
    batch, steps = diagonal.shape[:2]
    blocks = diagonal.new_zeros(batch, steps, steps, 2, 2)
    index = torch.arange(steps, device=diagonal.device)
    blocks[:, index, index] = diagonal
    blocks[:, index[1:], index[:-1]] = lower
    return blocks.transpose(2, 3).reshape(batch, 2 * steps, 2 * steps)


def _generic(like: Tensor, frequency: float = 78.233) -> Tensor:
    """A fixed vector without structure, `[batch, n]`, orthogonal to nothing that arises.

    Not random, so that a step depends on no generator state; not constant, because rows that sum to
    zero (centred weights) are orthogonal to a constant vector.
    """
    index = torch.arange(1, like.shape[1] + 1, dtype=torch.float64, device=like.device)
    noise = torch.frac(torch.sin(index * frequency) * 43758.5453)
    return noise.to(like.dtype).expand_as(like)


def _top_eigenvector(t: Tensor) -> Tensor:
    """The unit top eigenvector `[batch, k]` of positive `t` `[batch, k, k]`, float64.

    By repeated squaring: thirty squarings are 2^30 power iterations, with no eigensolver and no
    sync.
    """
    for _ in range(30):
        trace = t.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
        t = t / torch.where(trace == 0, 1, trace)
        t = t @ t
    column = t.diagonal(dim1=-2, dim2=-1).argmax(-1)  # all columns are parallel; take the longest
    best = t.gather(2, column[:, None, None].expand(-1, t.shape[1], 1))[:, :, 0]
    norm = torch.linalg.vector_norm(best, dim=-1, keepdim=True)
    return best / torch.where(norm == 0, 1, norm)
