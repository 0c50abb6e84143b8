"""Triton kernels for small float64 problems, with one program per matrix.

The equivalent PyTorch code takes seven to forty operations on a few numbers or vectors, and spends
most of its time on kernel launches. See `_top_eigenvector` and `orthonormal` in
`spectral.singular_triplets`, and `root` in `spectral.tangent_model`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALLEST = 16
"""Minimum side of a tile in a matmul."""
WARPS = 4
STAGES = 1
"""Software pipeline stages; with more stages, the vectors would not fit in registers."""
COLUMNS = 32
"""Number of vector columns read by each matmul."""


@triton.jit  # type: ignore[untyped-decorator]
def eigenvector_kernel(  # type: ignore[no-untyped-def]
    t, out, size,
    TINY: tl.constexpr,
    ROUNDS: tl.constexpr,
    SQUARINGS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Write the top eigenvector of one matrix in `t`, contiguous `[batch, size, size]`."""
    matrix = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SIZE)
    inside = (i[:, None] < size) & (i[None, :] < size)
    x = tl.load(t + (matrix * size + i[:, None]) * size + i[None, :], mask=inside, other=0.0)
    for _ in range(ROUNDS):
        x = x / tl.maximum(tl.max(x), TINY)
        for _ in range(SQUARINGS):
            x = tl.dot(x, x, out_dtype=tl.float64)
    # All columns are parallel; use the longest. Divide it by its largest entry before squaring,
    # because squares may overflow.
    diagonal = tl.sum(tl.where(i[:, None] == i[None, :], x, 0.0), axis=1)
    longest = tl.argmax(diagonal, axis=0)
    column = tl.sum(tl.where(i[None, :] == longest, x, 0.0), axis=1)
    column = column / tl.maximum(tl.max(diagonal), TINY)
    column = column / tl.maximum(tl.sqrt(tl.sum(column * column)), TINY)
    tl.store(out + matrix * size + i, column, mask=i < size)


@triton.jit  # type: ignore[untyped-decorator]
def root_kernel(  # type: ignore[no-untyped-def]
    block, weight, half, offset, slope, batch, nodes,
    ROUNDS: tl.constexpr,
    POINTS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Write the root and slope of one model in `block`, contiguous `[3, batch, nodes]`."""
    matrix = tl.program_id(0).to(tl.int64)
    point = tl.arange(0, SIZE)
    reach = tl.load(half + matrix)
    low, width = -reach, 2 * reach
    for _ in tl.static_range(ROUNDS):
        mu = low + width * (point.to(tl.float64) / POINTS)
        f = tl.zeros((SIZE,), tl.float64)
        for node in range(nodes):
            place = matrix * nodes + node
            uu = tl.load(block + place)
            uq = tl.load(block + batch * nodes + place)
            qq = tl.load(block + 2 * batch * nodes + place)
            top = uq + mu * uu
            f += tl.load(weight + place) * top / (qq + 1 + mu * (top + uq))
        last = tl.sum(((f <= 0) & (point <= POINTS)).to(tl.int32))
        last = tl.minimum(tl.maximum(last, 1), POINTS)
        f_low = tl.sum(tl.where(point == last - 1, f, 0.0))
        f_high = tl.sum(tl.where(point == last, f, 0.0))
        width = width / POINTS
        low += width * (last - 1)
    rise = f_high - f_low
    share = -f_low / tl.where(rise <= 0, 1.0, rise)
    share = tl.where(share < 0, 0.0, tl.where(share > 1, 1.0, share))  # preserves NaN
    tl.store(offset + matrix, low + share * width)
    tl.store(slope + matrix, rise / tl.where(width == 0, 1.0, width))


@triton.jit  # type: ignore[untyped-decorator]
def orthonormal_kernel(  # type: ignore[no-untyped-def]
    x, out, count, n, x_batch, x_row, x_col,
    DEPENDENT: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Orthonormalise the rows of one matrix in `x` `[batch, count, n]`. `out` is contiguous."""
    matrix = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SIZE)
    col = tl.arange(0, COLUMNS)
    source = x + matrix * x_batch + i[:, None] * x_row + col[None, :] * x_col
    target = out + (matrix * count + i[:, None]) * n + col[None, :]
    gram = tl.zeros((SIZE, SIZE), tl.float64)
    for first in range(0, n, COLUMNS):
        inside = (i[:, None] < count) & (col[None, :] < n - first)
        rows = tl.load(source + first * x_col, mask=inside, other=0.0).to(tl.float64)
        gram = tl.dot(rows, tl.trans(rows), gram, out_dtype=tl.float64)
    diagonal = i[:, None] == i[None, :]
    # Compute the Cholesky factor and its inverse together, row by row.
    rest = gram + tl.where(diagonal, DEPENDENT, 0.0)
    inverse = tl.where(diagonal, 1.0, 0.0).to(tl.float64)
    for k in range(count):
        across = tl.sum(tl.where(i[:, None] == k, rest, 0.0), axis=0)
        scale = 1.0 / tl.sqrt(tl.sum(tl.where(i == k, across, 0.0)))
        across = across * scale
        row = tl.sum(tl.where(i[:, None] == k, inverse, 0.0), axis=0) * scale
        below = tl.where(i > k, across, 0.0)
        rest = rest - below[:, None] * across[None, :]
        inverse = tl.where(i[:, None] == k, row[None, :], inverse - below[:, None] * row[None, :])
    product = tl.dot(inverse, gram, out_dtype=tl.float64)
    square = tl.sum(product * inverse, axis=1)
    inverse = tl.where((square < 0.25)[:, None], 0.0, inverse)
    for first in range(0, n, COLUMNS):
        inside = (i[:, None] < count) & (col[None, :] < n - first)
        rows = tl.load(source + first * x_col, mask=inside, other=0.0).to(tl.float64)
        result = tl.dot(inverse, rows, out_dtype=tl.float64)
        tl.store(target + first, result.to(out.dtype.element_ty), mask=inside)


def top_eigenvector(t: Tensor, squarings: Sequence[int], tiny: float) -> Tensor:
    """Compute the top eigenvectors `[batch, k]` of symmetric float64 `t` `[batch, k, k]`.

    `squarings` lists the number of squarings in each round; all entries must be equal.
    """
    batch, size = t.shape[:2]
    result = t.new_empty(batch, size)
    rows = t.mT if t.mT.is_contiguous() else t.contiguous()  # t is symmetric, often column-major
    if result.numel():
        eigenvector_kernel[(batch,)](
            rows, result, size,
            TINY=tiny,
            ROUNDS=len(squarings),
            SQUARINGS=squarings[0],
            SIZE=max(SMALLEST, triton.next_power_of_2(size)),
            num_warps=WARPS,
            num_stages=STAGES,
        )  # fmt: skip
    return result


def root(
    block: Tensor, weight: Tensor, half: Tensor, rounds: int, points: int
) -> tuple[Tensor, Tensor]:
    """Find the root and slope `[batch]` of each `spectral.tangent_model.Model`.

    `block` is `[3, batch, nodes]`, `weight` `[batch, nodes]` and `half` `[batch]`, all float64.
    """
    batch, nodes = weight.shape
    offset, slope = torch.empty_like(half), torch.empty_like(half)
    if batch:
        root_kernel[(batch,)](
            block.contiguous(), weight.contiguous(), half.contiguous(), offset, slope, batch, nodes,
            ROUNDS=rounds,
            POINTS=points,
            SIZE=triton.next_power_of_2(points + 1),
            num_warps=WARPS,
            num_stages=STAGES,
        )  # fmt: skip
    return offset, slope


def orthonormal(x: Tensor, dependent: float) -> Tensor:
    """Orthonormalise the rows of float32 or float64 `x` `[batch, count, n]` in float64.

    `dependent` is added to the diagonal of the rows' Gram matrix. In the result, linearly dependent
    rows are therefore shorter than 1; rows shorter than 0.5 are set to zero. The result has the
    dtype of `x`.
    """
    batch, count, n = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        orthonormal_kernel[(batch,)](
            x, out, count, n, *x.stride(),
            DEPENDENT=dependent,
            SIZE=max(SMALLEST, triton.next_power_of_2(count)),
            COLUMNS=COLUMNS,
            num_warps=WARPS,
            num_stages=STAGES,
        )  # fmt: skip
    return out
