"""Products of stacks of matrices by the library (cuBLAS, MKL): the CPU path, and the reference that
every kernel is tested against.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` for stacks; a single matrix goes the faster way that libraries have for it."""
    return torch.mm(a[0], b[0])[None] if a.shape[0] == 1 else torch.bmm(a, b)


def fused(c: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    """`beta c + alpha a @ b` for stacks, in one call."""
    if a.shape[0] == 1:
        return torch.addmm(c[0], a[0], b[0], beta=beta, alpha=alpha)[None]
    return torch.baddbmm(c, a, b, beta=beta, alpha=alpha)


def gram(x: Tensor) -> Tensor:
    """`X X^T` `[batch, rows, rows]` of `x` `[batch, rows, cols]`."""
    return product(x, x.mT)


def grams(stacks: Sequence[Tensor]) -> Tensor:
    """`X X^T` `[sum of batches, rows, rows]` of stacks `[batch, rows, cols]` of equal rows."""
    return torch.cat([gram(x) for x in stacks])


def power(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """`X W^T` `[batch, vectors, rows]` and `X W^T W` `[batch, vectors, cols]`."""
    y = x @ w.mT
    return y, y @ w


def commuting(p: Tensor, q: Tensor, a: float = 0.0) -> Tensor:
    """`P Q + a I` `[batch, n, n]`, symmetric, of symmetric `p` and `q` that commute."""
    return _with_diagonal(product(p, q), a)


def polynomial(r: Tensor, b: float, c: float, a: float = 0.0) -> Tensor:
    """`a I + b R + c R^2` `[batch, n, n]` of symmetric `r`."""
    return _with_diagonal(fused(r, r, r, b, c), a)


def _with_diagonal(x: Tensor, a: float) -> Tensor:
    """`x + a I`, in the buffer of `x`."""
    if a:
        x.diagonal(dim1=-2, dim2=-1).add_(a)
    return x
