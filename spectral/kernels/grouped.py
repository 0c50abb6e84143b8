"""Triton kernel of X X^T for stacks of matrices of equal row count and different column counts.

One launch serves up to `STACKS` stacks. What follows works on `X X^T`, which no longer depends on
the columns, and is one batch. Addresses, column counts and strides of the stacks are arguments of
the launch, so there is no table in device memory to fill or wait for, and a CUDA graph holds them.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import Tile
from .symmetric import (
    INTERPRETED,
    accumulated,
    check_operands,
    store_both,
    tile_of,
)

STACKS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _added(  # type: ignore[no-untyped-def]
    total, a, matrix, rows, cols, n, depth, a_batch, a_row, a_col,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Add to `total` the tile of `A A^T` at `rows`, `cols`, from the first `depth` columns."""
    inner = tl.arange(0, DEPTH)
    left = a + matrix * a_batch + rows[:, None] * a_row + inner[None, :] * a_col
    right = a + matrix * a_batch + inner[:, None] * a_col + cols[None, :] * a_row
    return accumulated(
        total, left, right, a_col, a_col, rows < n, cols < n, depth, DEPTH, PRECISION, WIDEN
    )


@triton.jit  # type: ignore[untyped-decorator]
def grouped_kernel(  # type: ignore[no-untyped-def]
    a0, a1, a2, a3, out, n, tiles,
    end0, end1, end2,
    depth0, depth1, depth2, depth3,
    batch0, row0, col0, batch1, row1, col1, batch2, row2, col2, batch3, row3, col3,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute one tile of `out` `[count, n, n]` and its mirror image.

    Stack i holds the matrices from `end` i - 1 to `end` i, each `[n, depth i]`.
    """
    program = tl.program_id(0)
    matrix = program // tiles
    row, col = tile_of(program % tiles)
    rows = row * BLOCK + tl.arange(0, BLOCK)
    cols = col * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    # All stacks but the matrix's own count as having no columns, so their addresses are not read.
    d0 = tl.where(matrix < end0, depth0, 0)
    d1 = tl.where((matrix >= end0) & (matrix < end1), depth1, 0)
    d2 = tl.where((matrix >= end1) & (matrix < end2), depth2, 0)
    d3 = tl.where(matrix >= end2, depth3, 0)
    m = matrix.to(tl.int64)
    total = _added(total, a0, m, rows, cols, n, d0, batch0, row0, col0, DEPTH, PRECISION, WIDEN)
    total = _added(
        total, a1, m - end0, rows, cols, n, d1, batch1, row1, col1, DEPTH, PRECISION, WIDEN
    )
    total = _added(
        total, a2, m - end1, rows, cols, n, d2, batch2, row2, col2, DEPTH, PRECISION, WIDEN
    )
    total = _added(
        total, a3, m - end2, rows, cols, n, d3, batch3, row3, col3, DEPTH, PRECISION, WIDEN
    )
    store_both(out + m * n * n, total, row, col, rows, cols, n)


def grams(stacks: Sequence[Tensor], tile: Tile) -> Tensor:
    """Compute `X X^T` of each stack `[batch, rows, cols]`, concatenated along the batch.

    The result is `[sum of batches, rows, rows]`. Rows, dtypes and devices agree; strides are free.
    """
    for x in stacks:
        check_operands(x, x)
    n = stacks[0].shape[1]
    count = sum(x.shape[0] for x in stacks)
    out = torch.empty(count, n, n, dtype=stacks[0].dtype, device=stacks[0].device)
    first = 0
    for start in range(0, len(stacks), STACKS):
        some = stacks[start : start + STACKS]
        last = first + sum(x.shape[0] for x in some)
        _launch(some, out[first:last], tile)
        first = last
    return out


def _launch(stacks: Sequence[Tensor], out: Tensor, tile: Tile) -> None:
    count, n, _ = out.shape
    if count == 0 or n == 0:
        return
    blocks = triton.cdiv(n, tile.block)
    tiles = blocks * (blocks + 1) // 2
    padded = [*stacks, *[stacks[0][:0]] * (STACKS - len(stacks))]
    ends = [sum(x.shape[0] for x in padded[: i + 1]) for i in range(STACKS - 1)]
    strides = [stride for x in padded for stride in x.stride()]
    grouped_kernel[(count * tiles,)](
        *padded, out, n, tiles, *ends, *(x.shape[2] for x in padded), *strides,
        **tile.options(widen=INTERPRETED),
    )  # fmt: skip
