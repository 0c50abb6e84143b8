"""Products of stacks of matrices by the library (cuBLAS, MKL).

These are the CPU path, and the reference that every kernel is tested against. float16 products on
a CPU go through float32, as a GPU accumulates them: torch's own take 6 to 90 times as long there
(torch 2.13, one thread, 32 to 1,024 rows), and err as much.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor) -> Tensor:
    """Compute `a @ b` for stacks; a single matrix takes the faster unbatched call."""
    if _is_slow(a):
        return product(a.float(), b.float()).to(a.dtype)
    return torch.mm(a[0], b[0])[None] if a.shape[0] == 1 else torch.bmm(a, b)


def fused(c: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    """Compute `beta c + alpha a @ b` for stacks, in one call."""
    if _is_slow(a):
        return fused(c.float(), a.float(), b.float(), beta, alpha).to(a.dtype)
    if a.shape[0] == 1:
        return torch.addmm(c[0], a[0], b[0], beta=beta, alpha=alpha)[None]
    return torch.baddbmm(c, a, b, beta=beta, alpha=alpha)


def fused_(c: Tensor, a: Tensor, b: Tensor, beta: float) -> None:
    """Replace `c` by `beta c + a @ b` for stacks."""
    if _is_slow(a):
        c.copy_(fused(c, a, b, beta, 1.0))
    else:
        c.baddbmm_(a, b, beta=beta)


def gram(x: Tensor) -> Tensor:
    """Compute `X X^T` `[batch, rows, rows]` of `x` `[batch, rows, cols]`."""
    return product(x, x.mT)


def grams(stacks: Sequence[Tensor]) -> Tensor:
    """Compute `X X^T` `[sum of batches, rows, rows]` of stacks `[batch, rows, cols]`."""
    return torch.cat([gram(x) for x in stacks])


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


def _is_slow(x: Tensor) -> bool:
    """Return whether the library multiplies such matrices slower than wider ones."""
    return x.dtype == torch.float16 and x.device.type == "cpu"
