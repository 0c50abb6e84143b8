"""Products of stacks of matrices by the library (cuBLAS, MKL).

These are the CPU path, and the reference that every kernel is tested against.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """Compute `a @ b` for stacks; a single matrix takes the faster unbatched call."""
    return torch.mm(a[0], b[0])[None] if a.shape[0] == 1 else torch.bmm(a, b)


def fused(c: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    """Compute `beta c + alpha a @ b` for stacks, in one call."""
    if a.shape[0] == 1:
        return torch.addmm(c[0], a[0], b[0], beta=beta, alpha=alpha)[None]
    return torch.baddbmm(c, a, b, beta=beta, alpha=alpha)


def gram(x: Tensor) -> Tensor:
    """Compute `X X^T` `[batch, rows, rows]` of `x` `[batch, rows, cols]`."""
    return product(x, x.mT)


def grams(stacks: Sequence[Tensor]) -> Tensor:
    """Compute `X X^T` `[sum of batches, rows, rows]` of stacks `[batch, rows, cols]`."""
    return torch.cat([gram(x) for x in stacks])


def power(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `X W^T` `[batch, vectors, rows]` and `X W^T W` `[batch, vectors, cols]`."""
    y = x @ w.mT
    return y, y @ w


def commuting(p: Tensor, q: Tensor, a: float = 0.0) -> Tensor:
    """Compute the symmetric `P Q + a I` `[batch, n, n]` of symmetric, commuting `p` and `q`."""
    return _with_diagonal(product(p, q), a)


def polynomial(r: Tensor, b: float, c: float, a: float = 0.0) -> Tensor:
    """Compute `a I + b R + c R^2` `[batch, n, n]` of symmetric `r`."""
    return _with_diagonal(fused(r, r, r, b, c), a)


def _with_diagonal(x: Tensor, a: float) -> Tensor:
    """Add `a I` to `x` in place."""
    if a:
        x.diagonal(dim1=-2, dim2=-1).add_(a)
    return x
