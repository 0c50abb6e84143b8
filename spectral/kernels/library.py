"""Batched matmuls using the library (cuBLAS, MKL).

This is the CPU path, and the reference in every kernel test. If the CPU has no instructions for a
dtype, matmuls are computed in float32, the dtype in which GPUs accumulate. This is the case for
float16, and for bfloat16 without AVX-512, as on most laptops. torch's matmuls in these dtypes are
no more accurate, and take 10 to 50 times as long (torch 2.13, one thread, 128 to 1,024 rows, AMD
EPYC with AVX2).
"""

import math
from functools import partial

import torch
from torch import Tensor

SLOW_ON_CPU = {torch.float16}
"""Dtypes in which CPU matmuls are computed in float32."""
if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"):
    SLOW_ON_CPU.add(torch.bfloat16)
BLOCKS = 4
"""Number of row blocks in a large symmetric product on CPU; 4 blocks save 6/16 of the FLOPs."""
LEAST_ROWS = {torch.float32: 512, torch.float64: 512}
"""Smallest number of rows for which blocks are faster, by dtype; see `product`."""


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
    """Compute `A B + diagonal I` or, with `c`, `alpha A B + beta C + diagonal I` for stacks.

    Without `b`, B is `A^T`. A stack of one matrix uses the faster unbatched call.

    On CPU, a large `symmetric` result `[batch, n, n]` is computed in row blocks up to the diagonal
    and mirrored, which makes it exactly symmetric. Products recorded by autograd are never computed
    in blocks.

    The following ratios are the CPU time of X X^T in blocks divided by the CPU time of the whole
    product, in float32 on one thread (torch 2.13). On an AMD EPYC with AVX2 (an Intel Xeon with
    AVX-512), the ratio is 0.90 (0.90) at 512 x 512, 0.73 (0.78) at 512 x 2048, 0.77 (0.80) at 1024
    x 1024, and 0.67 (0.76) at 2048 x 2048. Ratios in float64 are similar. The ratio is 1.0 to 1.2
    at 384 x 384 and 1.8 at 256 x 256. Two blocks are slower than four; below 1,024 rows, eight are
    also slower than four. On processors with bfloat16 instructions, blocks take 1.5 to 4 times as
    long as the whole product.
    """
    other = a.mT if b is None else b
    by_blocks = (
        symmetric
        and not (torch.is_grad_enabled() and (a.requires_grad or other.requires_grad))
        and a.device.type == "cpu"  # on other devices, the shape may be unknown under tracing
        and a.shape[1] >= LEAST_ROWS.get(a.dtype, math.inf)
    )
    if is_slow(a):
        p = a.float()
        q = p if b is a else None if b is None else b.float()
        r = p if c is a else None if c is None else c.float()
        result = product(p, q, r, alpha=alpha, beta=beta, symmetric=symmetric).to(a.dtype)
    elif by_blocks:
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


def _mirror_(x: Tensor) -> None:
    """Mirror the lower triangle of `x` `[batch, n, n]` upwards, using little memory."""
    n = x.shape[-1]
    if n <= 64:
        x.tril_().add_(x.tril(-1).mT)
        return
    first, last = slice(0, n // 2), slice(n // 2, n)
    x[:, first, last] = x[:, last, first].mT
    _mirror_(x[:, first, first])
    _mirror_(x[:, last, last])


def is_slow(x: Tensor) -> bool:
    """Return whether matmuls in the dtype of `x` are slower on its device than in float32."""
    return x.device.type == "cpu" and x.dtype in SLOW_ON_CPU


def product_flops(rows: int, inner: int, cols: int) -> float:
    """Return the FLOP count (not FLOP/s) of `[rows, inner] @ [inner, cols]`.

    A multiply-add counts as two FLOPs. Algorithm costs count the matmuls that the code runs, but
    not the small dense algebra in Krylov spaces, which only matters below about 100 rows. Placement
    balances FLOPs; time is modelled in parallel/plan/devices.py.
    """
    return 2.0 * rows * inner * cols
