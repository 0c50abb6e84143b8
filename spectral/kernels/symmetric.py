"""Triton kernels for batched symmetric matmuls, which compute only half of the tiles.

    C = alpha A B^T + beta S + gamma I,    where C is symmetric because `A = B`, or because `A`,
                                           `B` and `S` are polynomials of one symmetric matrix.

Each program computes one tile on or below the diagonal, and writes the tile and its mirror image.
This takes half the FLOPs of a general matmul. Results are accumulated in float32 and rounded once.
A matrix's result does not depend on the batch size.

`grams` computes X X^T for stacks of matrices with equal row counts but different column counts, up
to `STACKS` stacks per launch. Since the shape of X X^T does not depend on the column count, later
steps process all results as one batch. The stacks' addresses, column counts and strides are launch
arguments, which a CUDA graph captures, so no table in device memory is needed.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import QUACK, Tile

MAX_EXTENT = 2**31
"""Offsets within a matrix are 32-bit; offsets of matrices within a stack are 64-bit."""


@triton.jit
def tile_of(index):  # type: ignore[no-untyped-def]
    """Return the row and column of tile `index` in a lower triangle, in row-major order."""
    row = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The square root may be off by one for large triangles.
    row = tl.where(row * (row + 1) // 2 > index, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)
    return row, index - row * (row + 1) // 2


@triton.jit  # type: ignore[untyped-decorator]
def accumulated(  # type: ignore[no-untyped-def]
    total, left, right, left_step, right_step, rows_inside, cols_inside, depth,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Accumulate the product of two tiles with `depth` inner columns into `total`.

    `left` and `right` point to the first `DEPTH` columns. `left_step` and `right_step` are the
    column strides.
    """
    inner = tl.arange(0, DEPTH)
    for start in range(0, depth, DEPTH):
        inside = inner < depth - start
        x = tl.load(left, mask=rows_inside[:, None] & inside[None, :], other=0.0)
        y = tl.load(right, mask=inside[:, None] & cols_inside[None, :], other=0.0)
        if WIDEN:
            x, y = x.to(tl.float32), y.to(tl.float32)
        total = tl.dot(x, y, total, input_precision=PRECISION)
        left += DEPTH * left_step
        right += DEPTH * right_step
    return total


@triton.jit
def store_both(target, total, row, col, rows, cols, n):  # type: ignore[no-untyped-def]
    """Write a tile and its mirror image to the symmetric matrix `[n, n]` at `target`."""
    result = total.to(target.dtype.element_ty)
    # Make diagonal tiles bitwise symmetric; tiles below the diagonal are unaffected.
    mirrored = tl.trans(result)
    result = tl.where(rows[:, None] >= cols[None, :], result, mirrored)
    present = (rows < n)[:, None] & (cols < n)[None, :]
    tl.store(target + rows[:, None] * n + cols[None, :], result, mask=present)
    if row > col:
        swapped = (cols < n)[:, None] & (rows < n)[None, :]
        tl.store(target + cols[:, None] * n + rows[None, :], mirrored, mask=swapped)


@triton.jit  # type: ignore[untyped-decorator]
def symmetric_kernel(  # type: ignore[no-untyped-def]
    a, b, s, out,
    n, depth, tiles,
    a_batch, a_row, a_col,
    b_batch, b_row, b_col,
    s_batch, s_row, s_col,
    out_batch,
    alpha, beta, gamma,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute one tile of `out` `[batch, n, n]` and its mirror image.

    `a` and `b` are `[batch, n, depth]`.
    """
    program = tl.program_id(0)
    matrix = (program // tiles).to(tl.int64)
    row, col = tile_of(program % tiles)
    rows = row * BLOCK + tl.arange(0, BLOCK)
    cols = col * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, DEPTH)
    left = a + matrix * a_batch + rows[:, None] * a_row + inner[None, :] * a_col
    right = b + matrix * b_batch + inner[:, None] * b_col + cols[None, :] * b_row
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    total = accumulated(
        total, left, right, a_col, b_col, rows < n, cols < n, depth, DEPTH, PRECISION, WIDEN
    )
    total = total * alpha
    present = (rows < n)[:, None] & (cols < n)[None, :]
    if ADD:
        term = s + matrix * s_batch + rows[:, None] * s_row + cols[None, :] * s_col
        total += beta * tl.load(term, mask=present, other=0.0).to(tl.float32)
    total += tl.where(rows[:, None] == cols[None, :], gamma, 0.0)
    store_both(out + matrix * out_batch, total, row, col, rows, cols, n)


INTERPRETED = not isinstance(symmetric_kernel, triton.runtime.JITFunction)
"""Whether the kernels run in Triton's interpreter. The interpreter would multiply the bit patterns
of bfloat16 operands, so they are upcast to float32, which does not change the results."""


def product(
    a: Tensor,
    b: Tensor,
    tile: Tile,
    s: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    gamma: float = 0.0,
) -> Tensor:
    """Compute `alpha A B^T + beta S + gamma I` `[batch, n, n]` in one launch.

    `a` and `b` are `[batch, n, depth]`. Operands may have any strides.
    """
    check_operands(a, b)
    if tile == QUACK:  # also computes only half of the tiles
        from quack.gemm_interface import gemm_symmetric  # type: ignore[import-not-found]

        result: Tensor = gemm_symmetric(a, b.mT, s, alpha=alpha, beta=beta)
        if gamma:
            result.diagonal(dim1=-2, dim2=-1).add_(gamma)
        return result
    batch, n, depth = a.shape
    out = torch.empty(batch, n, n, dtype=a.dtype, device=a.device)
    if batch == 0 or n == 0:
        return out
    blocks = triton.cdiv(n, tile.block)
    tiles = blocks * (blocks + 1) // 2
    term = a if s is None else s
    symmetric_kernel[(batch * tiles,)](
        a, b, term, out,
        n, depth, tiles,
        *a.stride(), *b.stride(), *term.stride(),
        n * n,
        alpha, beta, gamma,
        ADD=s is not None,
        **tile.options(widen=INTERPRETED),
    )  # fmt: skip
    return out


def check_operands(a: Tensor, b: Tensor) -> None:
    """Raise ValueError for operands not supported by the symmetric kernels."""
    if a.ndim != 3 or a.shape != b.shape:
        raise ValueError(
            "a and b must both have shape [batch, n, depth], got "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.dtype not in (torch.float32, torch.bfloat16, torch.float16) or b.dtype != a.dtype:
        raise ValueError(
            "a and b must both be float32, both bfloat16 or both float16, got "
            f"{a.dtype} and {b.dtype}"
        )
    for x in (a, b):
        extent = sum(
            (size - 1) * abs(stride)
            for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True)
        )
        if max(extent, x.shape[1] ** 2) >= MAX_EXTENT:
            raise ValueError(f"a matrix must span fewer than 2^31 elements, got {extent + 1}")


STACKS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _added(  # type: ignore[no-untyped-def]
    total, a, matrix, rows, cols, n, depth, a_batch, a_row, a_col,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Accumulate the tile of `A A^T` at `rows`, `cols` into `total`, using `depth` columns."""
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

    Stack i contains the matrices `end{i-1}` to `end{i} - 1`, each `[n, depth{i}]`.
    """
    program = tl.program_id(0)
    matrix = program // tiles
    row, col = tile_of(program % tiles)
    rows = row * BLOCK + tl.arange(0, BLOCK)
    cols = col * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    # Set the depth of stacks that do not contain this matrix to zero, so that they are not read.
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

    The result is `[sum of batches, rows, rows]`. Row counts, dtypes and devices must match; any
    strides are supported.
    """
    for x in stacks:
        check_operands(x, x)
    n = stacks[0].shape[1]
    count = sum(x.shape[0] for x in stacks)
    out = torch.empty(count, n, n, dtype=stacks[0].dtype, device=stacks[0].device)
    if count == 0 or n == 0:
        return out
    blocks = triton.cdiv(n, tile.block)
    tiles = blocks * (blocks + 1) // 2
    first = 0
    for start in range(0, len(stacks), STACKS):
        some = stacks[start : start + STACKS]
        padded = [*some, *[some[0][:0]] * (STACKS - len(some))]
        ends = [sum(x.shape[0] for x in padded[: i + 1]) for i in range(STACKS - 1)]
        last = first + sum(x.shape[0] for x in some)
        if last > first:
            strides = [stride for x in padded for stride in x.stride()]
            grouped_kernel[((last - first) * tiles,)](
                *padded, out[first:last], n, tiles, *ends, *(x.shape[2] for x in padded), *strides,
                **tile.options(widen=INTERPRETED),
            )  # fmt: skip
        first = last
    return out
