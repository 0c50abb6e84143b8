"""Triton kernel of a power iteration's two products, with one pass over the matrices.

    Y = X W^T,    Z = Y W,

for a few rows X. A program takes some rows of W, sums their products with X over all columns, and
reads the same rows again, which the second-level cache still holds, for their share of Z. The
shares are added in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import Tile

VECTORS = 2
"""Rows of X that a program multiplies at a time."""


@triton.jit  # type: ignore[untyped-decorator]
def power_kernel(  # type: ignore[no-untyped-def]
    w, x, y, z,
    rows, cols, vectors, parts,
    w_batch, w_row, w_col,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Multiply `BLOCK` rows of one matrix by `x` `[batch, vectors, cols]`.

    Writes `y` `[batch, vectors, rows]` and the rows' share of `z` `[batch, parts, vectors, cols]`;
    all three are contiguous.
    """
    matrix = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    mine = part * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, DEPTH)
    first = w + matrix * w_batch + mine[:, None] * w_row + inner[None, :] * w_col
    second = vectors > 1
    source = x + matrix * vectors * cols
    one = tl.zeros((BLOCK,), tl.float32)
    two = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, cols, DEPTH):
        inside = inner < cols - start
        block = tl.load(
            first + start * w_col, mask=(mine < rows)[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
        u = tl.load(source + start + inner, mask=inside, other=0.0)
        v = tl.load(source + cols + start + inner, mask=inside & second, other=0.0)
        one += tl.sum(block * u[None, :], axis=1)
        two += tl.sum(block * v[None, :], axis=1)
    target = y + matrix * vectors * rows + mine
    tl.store(target, one, mask=mine < rows)
    tl.store(target + rows, two, mask=(mine < rows) & second)
    share = z + tl.program_id(0).to(tl.int64) * vectors * cols
    for start in range(0, cols, DEPTH):
        inside = inner < cols - start
        block = tl.load(
            first + start * w_col, mask=(mine < rows)[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
        tl.store(share + start + inner, tl.sum(block * one[:, None], axis=0), mask=inside)
        tl.store(
            share + cols + start + inner,
            tl.sum(block * two[:, None], axis=0),
            mask=inside & second,
        )


def power(w: Tensor, x: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Compute `X W^T` `[batch, vectors, rows]` and `X W^T W` `[batch, vectors, cols]`, float32.

    `w` is `[batch, rows, cols]` of any strides, `x` `[batch, vectors, cols]`. A tile's `block` is
    the number of rows of a program, its `depth` the number of columns of a step. Raises ValueError
    for shapes, dtypes or sizes that the kernel cannot take.
    """
    _check(w, x)
    batch, rows, cols = w.shape
    ys, zs = [], []
    for some in torch.split(x.float(), VECTORS, dim=1):
        vectors, parts = some.shape[1], triton.cdiv(rows, tile.block)
        y = torch.empty(batch, vectors, rows, device=w.device)
        z = torch.empty(batch, parts, vectors, cols, device=w.device)
        if y.numel():
            power_kernel[(batch * parts,)](
                w, some.contiguous(), y, z,
                rows, cols, vectors, parts,
                *w.stride(),
                BLOCK=tile.block,
                DEPTH=tile.depth,
                **tile.options,
            )  # fmt: skip
        ys.append(y)
        zs.append(z.sum(1))
    return torch.cat(ys, 1), torch.cat(zs, 1)


def _check(w: Tensor, x: Tensor) -> None:
    if w.ndim != 3 or x.ndim != 3 or (x.shape[0], x.shape[2]) != (w.shape[0], w.shape[2]):
        raise ValueError(
            f"w, x must be [b, rows, cols], [b, vectors, cols], got {tuple(w.shape)}, "
            f"{tuple(x.shape)}"
        )
    if w.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"w must be float32, bfloat16 or float16, got {w.dtype}")
    if w.shape[1:].numel() >= 2**31:
        raise ValueError(f"a matrix must have less than 2^31 elements, got {tuple(w.shape[1:])}")
