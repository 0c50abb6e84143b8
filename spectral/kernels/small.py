"""Triton kernels of the small problems of each matrix: one program does all of one, in float64.

Their library forms, `_top_eigenvector` of `spectral.power_iteration` and `root` of
`spectral.tangent_model`, are some thirty operations on a few numbers each, which a device spends on
launching them.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALLEST = 16
"""Least side of a product of tiles."""
WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def eigenvector_kernel(  # type: ignore[no-untyped-def]
    t, out, size,
    TINY: tl.constexpr,
    ROUNDS: tl.constexpr,
    SQUARINGS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Write the top eigenvector of one matrix of `t` `[batch, size, size]`, contiguous."""
    matrix = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SIZE)
    inside = (i[:, None] < size) & (i[None, :] < size)
    x = tl.load(t + (matrix * size + i[:, None]) * size + i[None, :], mask=inside, other=0.0)
    for _ in range(ROUNDS):
        x = x / tl.maximum(tl.max(x), TINY)
        for _ in range(SQUARINGS):
            x = tl.dot(x, x, out_dtype=tl.float64)
    # All columns are parallel: take the longest.
    diagonal = tl.sum(tl.where(i[:, None] == i[None, :], x, 0.0), axis=1)
    longest = tl.argmax(diagonal, axis=0)
    column = tl.sum(tl.where(i[None, :] == longest, x, 0.0), axis=1)
    column = column / tl.maximum(tl.sqrt(tl.sum(column * column)), TINY)
    tl.store(out + matrix * size + i, column, mask=i < size)


@triton.jit  # type: ignore[untyped-decorator]
def root_kernel(  # type: ignore[no-untyped-def]
    block, weight, half, offset, slope, batch, nodes,
    ROUNDS: tl.constexpr,
    POINTS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Write root and slope of one model of `block` `[3, batch, nodes]`, contiguous."""
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
    share = tl.where(share < 0, 0.0, tl.where(share > 1, 1.0, share))  # NaN stays
    tl.store(offset + matrix, low + share * width)
    tl.store(slope + matrix, rise / tl.where(width == 0, 1.0, width))


def top_eigenvector(t: Tensor, squarings: Sequence[int], tiny: float) -> Tensor:
    """Compute the top eigenvector `[batch, k]` of symmetric `t` `[batch, k, k]`.

    Raises ValueError for another dtype than float64, or counts of squarings that differ.
    """
    check_double(t)
    if len(set(squarings)) != 1:
        raise ValueError(f"squarings must be equal, got {squarings}")
    batch, size = t.shape[:2]
    found = t.new_empty(batch, size)
    rows = t.mT if t.mT.is_contiguous() else t.contiguous()  # solutions come as columns
    if found.numel():
        eigenvector_kernel[(batch,)](
            rows, found, size,
            TINY=tiny,
            ROUNDS=len(squarings),
            SQUARINGS=squarings[0],
            SIZE=max(SMALLEST, triton.next_power_of_2(size)),
            num_warps=WARPS,
        )  # fmt: skip
    return found


def root(
    block: Tensor, weight: Tensor, half: Tensor, rounds: int, points: int
) -> tuple[Tensor, Tensor]:
    """Find root and slope `[batch]` of models with `block` `[3, batch, nodes]`.

    `weight` is `[batch, nodes]`, `half` `[batch]`. Raises ValueError for another dtype than
    float64.
    """
    check_double(block, weight, half)
    batch, nodes = weight.shape
    offset, slope = torch.empty_like(half), torch.empty_like(half)
    if batch:
        root_kernel[(batch,)](
            block.contiguous(), weight.contiguous(), half.contiguous(), offset, slope, batch, nodes,
            ROUNDS=rounds,
            POINTS=points,
            SIZE=triton.next_power_of_2(points + 1),
            num_warps=WARPS,
        )  # fmt: skip
    return offset, slope


def check_double(*tensors: Tensor) -> None:
    """Raise ValueError unless all are float64, in which small problems keep their digits."""
    for tensor in tensors:
        if tensor.dtype != torch.float64:
            raise ValueError(f"small problems must be float64, got {tensor.dtype}")
