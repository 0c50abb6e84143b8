"""Products of stacks of matrices by the library (cuBLAS, MKL).

They are the CPU path, and the reference of every kernel's test. Dtypes without CPU instructions
(float16, and bfloat16 where torch uses no AVX-512, as on most laptops) are multiplied in float32,
as a GPU accumulates them: torch's own products take 10 to 50 times as long (torch 2.13, one thread,
128 to 1,024 rows, AMD EPYC with AVX2), and their errors are as large.
"""

import math
from functools import partial

import torch
from torch import Tensor

SLOW_ON_CPU = {torch.float16}
"""Dtypes that a CPU multiplies in float32."""
if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"):
    SLOW_ON_CPU.add(torch.bfloat16)
BLOCKS = 4
"""Number of blocks of rows in a CPU's large symmetric product; four take 10/16 of its FLOPs."""
LEAST_ROWS = {torch.float32: 512, torch.float64: 512}
"""Number of rows from which blocks are faster, by dtype; see `product`."""


def product(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    diagonal: float = 0.0,
    symmetric: bool = False,
) -> Tensor:
    """Compute `A B`, or `alpha A B + beta C`, plus `diagonal I`, for stacks in one call.

    Without `b`, B is `A^T`. A single matrix takes the faster unbatched call.

    On a CPU, a large `symmetric` result `[batch, n, n]` is computed in blocks of rows up to the
    diagonal and mirrored, so it is exactly symmetric. A differentiated product is always computed
    whole.

    Processor time of X X^T by blocks relative to the whole product, in float32 on one thread (torch
    2.13), on an AMD EPYC with AVX2 and, in brackets, on an Intel Xeon with AVX-512: 0.90 (0.90) at
    512 x 512, 0.73 (0.78) at 512 x 2048, 0.77 (0.80) at 1024 x 1024 and 0.67 (0.76) at 2048 x 2048.
    float64 gains as much. The ratio is 1.0 to 1.2 at 384 x 384 and 1.8 at 256 x 256. Two blocks are
    slower, and so are eight below 1,024 rows. Where a processor has instructions for bfloat16,
    blocks take 1.5 to 4 times as long as the whole.
    """
    other = a.mT if b is None else b
    if is_slow(a):
        p = a.float()
        q = p if b is a else None if b is None else b.float()
        r = p if c is a else None if c is None else c.float()
        result = product(p, q, r, alpha=alpha, beta=beta, symmetric=symmetric).to(a.dtype)
    elif symmetric and _pays_by_blocks(a, other):
        n = a.shape[1]
        result = a.new_empty(a.shape[0], n, n) if c is None else c.clone()
        size = -(-n // BLOCKS)
        for start in range(0, n, size):
            rows, cols = slice(start, start + size), slice(0, start + size)
            result[:, rows, cols].baddbmm_(a[:, rows], other[:, :, cols], beta=beta, alpha=alpha)
        _mirror_(result)
    elif c is None:
        result = torch.mm(a[0], other[0])[None] if a.shape[0] == 1 else torch.bmm(a, other)
    elif a.shape[0] == 1:
        result = torch.addmm(c[0], a[0], other[0], beta=beta, alpha=alpha)[None]
    else:
        result = torch.baddbmm(c, a, other, beta=beta, alpha=alpha)
    if diagonal:
        result.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return result


symmetric = partial(product, symmetric=True)
"""`product` with a symmetric result."""


def _pays_by_blocks(a: Tensor, b: Tensor) -> bool:
    """Return whether the symmetric product of `a` and `b` is faster by blocks of rows."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return False
    # The shape is not read on other devices: a traced shape may be unknown.
    return a.device.type == "cpu" and a.shape[1] >= LEAST_ROWS.get(a.dtype, math.inf)


def _mirror_(x: Tensor) -> None:
    """Copy the lower triangle of `x` `[batch, n, n]` to the upper, with little extra memory."""
    n = x.shape[-1]
    if n <= 64:
        x.tril_().add_(x.tril(-1).mT)
        return
    first, last = slice(0, n // 2), slice(n // 2, n)
    x[:, first, last] = x[:, last, first].mT
    _mirror_(x[:, first, first])
    _mirror_(x[:, last, last])


def is_slow(x: Tensor) -> bool:
    """Return whether the library multiplies matrices of this dtype more slowly than float32."""
    return x.device.type == "cpu" and x.dtype in SLOW_ON_CPU
