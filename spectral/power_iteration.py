"""Top singular triplets tracked from step to step, batched, without a host sync.

Each call is a short block Krylov iteration from the cached vector and one fixed generic vector,
followed by Rayleigh-Ritz, which takes the best vector of the space. A step costs two products with
a block of two columns, as a power iteration with two vectors would, and converges with the square
root of the spectral gap. The generic vector finds directions orthogonal to the cached one.
"""

import torch
from torch import Tensor

from spectral.krylov import Bidiagonal, bidiagonalize

COLD_STEPS = 48


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
    start = u.to(work.dtype)
    # Without a cached vector, two generic vectors span twice the space of one.
    norm = torch.linalg.vector_norm(start, dim=1, keepdim=True)
    known = (norm > 0) & norm.isfinite()
    start = torch.where(known, start, _generic(start, 43.7581))
    projection = bidiagonalize(work, start, _generic(start), min(steps, (w.shape[1] + 1) // 2 + 1))
    factor = _dense(projection).double()  # [batch, k, k], Q W = L P
    best = _top_eigenvector(factor @ factor.mT)[:, None]  # [batch, 1, k]
    left = (best.to(work.dtype) @ projection.left)[:, 0]
    right = ((best @ factor).to(work.dtype) @ projection.right)[:, 0]
    # Summed in float64, in which the squares of no float32 overflow.
    sigma = torch.linalg.vector_norm(right, dim=-1, dtype=torch.float64).to(right.dtype)
    alive = (sigma > 0)[:, None]
    right = right / torch.where(alive, sigma[:, None], 1)
    left = torch.where(alive, left, 0)
    return sigma.to(w.dtype), left.to(w.dtype), right.to(w.dtype)


def cold_start(w: Tensor, *, steps: int = COLD_STEPS) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the top triplet `(sigma, u, v)` of each `w` `[batch, rows, cols]` without cache."""
    return top_singular(
        w, w.new_zeros(w.shape[:2]), w.new_zeros(w.shape[0], w.shape[2]), steps=steps
    )


def _dense(projection: Bidiagonal) -> Tensor:
    """Assemble `L` `[batch, 2 steps, 2 steps]` of the projection."""
    diagonal, lower = projection.diagonal, projection.lower
    batch, steps = diagonal.shape[:2]
    blocks = diagonal.new_zeros(batch, steps, steps, 2, 2)
    index = torch.arange(steps, device=diagonal.device)
    blocks[:, index, index] = diagonal
    blocks[:, index[1:], index[:-1]] = lower
    return blocks.transpose(2, 3).reshape(batch, 2 * steps, 2 * steps)


def _generic(like: Tensor, frequency: float = 78.233) -> Tensor:
    """Fixed vectors without structure, `[batch, n]`.

    Not random, so that a step depends on no generator state. Not constant, because rows that sum to
    zero (centred weights) are orthogonal to a constant vector.
    """
    index = torch.arange(1, like.shape[1] + 1, dtype=torch.float64, device=like.device)
    noise = torch.frac(torch.sin(index * frequency) * 43758.5453)
    return noise.to(like.dtype).expand_as(like)


def _top_eigenvector(t: Tensor) -> Tensor:
    """Compute the unit top eigenvector `[batch, k]` of positive `t` `[batch, k, k]`, float64.

    Thirty squarings amount to 2^30 power iterations, without an eigensolver or a host sync.
    """
    for _ in range(30):
        trace = t.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
        t = t / torch.where(trace == 0, 1, trace)
        t = t @ t
    column = t.diagonal(dim1=-2, dim2=-1).argmax(-1)  # all columns are parallel: take the longest
    best = t.gather(2, column[:, None, None].expand(-1, t.shape[1], 1))[:, :, 0]
    norm = torch.linalg.vector_norm(best, dim=-1, keepdim=True)
    return best / torch.where(norm == 0, 1, norm)
