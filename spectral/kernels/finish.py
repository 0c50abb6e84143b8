"""Triton kernel of msign's last product with the update of the weights in its epilogue.

    D = a Y + P Y,    W <- (1 - lr decay) W - step D,    sum D^2 per program,

and a copy of W in the dtype that the model reads. D is neither written nor rounded to the dtype of
the products. Only rules whose step length is known before D can use it, not those that choose among
several directions. Learning rates and decay of each matrix, and the predicate, are read on the
device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from spectral.kernels.dispatch import Tile
from spectral.kernels.symmetric import INTERPRETED, accumulated
from spectral.kernels.update import check_rates


@triton.jit  # type: ignore[untyped-decorator]
def finish_kernel(  # type: ignore[no-untyped-def]
    weight, copy, p, y, squares, factor, step, active,
    m, n, a,
    w_batch, w_row, w_col,
    c_batch, c_row, c_col,
    p_batch, p_row, p_col,
    y_batch, y_row, y_col,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Update one tile of `weight` `[batch, m, n]`; `p` `[batch, m, m]`, `y` `[batch, m, n]`."""
    down, across = tl.cdiv(m, BLOCK), tl.cdiv(n, BLOCK)
    matrix = (tl.program_id(0) // (down * across)).to(tl.int64)
    tile = tl.program_id(0) % (down * across)
    # Tiles that follow each other share columns of Y.
    rows = (tile % down) * BLOCK + tl.arange(0, BLOCK)
    cols = (tile // down) * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, DEPTH)
    left = p + matrix * p_batch + rows[:, None] * p_row + inner[None, :] * p_col
    right = y + matrix * y_batch + inner[:, None] * y_row + cols[None, :] * y_col
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    total = accumulated(
        total, left, right, p_col, y_row, rows < m, cols < n, m, DEPTH, PRECISION, WIDEN
    )
    present = (rows < m)[:, None] & (cols < n)[None, :]
    here = y + matrix * y_batch + rows[:, None] * y_row + cols[None, :] * y_col
    d = total + a * tl.load(here, mask=present, other=0.0).to(tl.float32)
    d = tl.where(present, d, 0.0)
    tl.store(squares + tl.program_id(0), tl.sum(tl.sum(d * d, axis=1), axis=0))
    place = weight + matrix * w_batch + rows[:, None] * w_row + cols[None, :] * w_col
    w = tl.load(place, mask=present, other=0.0)
    new = w * tl.load(factor + matrix) - d * tl.load(step + matrix)
    # Masked, not multiplied: NaN of a skipped unit must not reach the weights.
    moved = present & (tl.load(active + matrix) != 0)
    tl.store(place, new, mask=moved)
    if COPY:
        other = copy + matrix * c_batch + rows[:, None] * c_row + cols[None, :] * c_col
        tl.store(other, new.to(copy.dtype.element_ty), mask=moved)


def finish_(
    weight: Tensor,
    p: Tensor,
    a: float,
    y: Tensor,
    factor: Tensor,
    step: Tensor,
    active: Tensor,
    copy: Tensor | None,
    tile: Tile,
) -> Tensor:
    """Update `weight` by `D = a Y + P Y` in place where `active` and return ||D||^2 `[batch]`.

    `weight <- factor weight - step D`; `copy` receives the result, rounded. All strides are
    allowed, and all tensors lie on one device.

    Args:
        weight: `[batch, rows, cols]`, float32.
        p: `[batch, m, m]`, with m the rows of `y`, of one of the kernels' dtypes.
        a: factor of Y.
        y: `[batch, rows, cols]` or its transpose, of the dtype of `p`.
        factor, step: `[batch]`, float32, contiguous.
        active: bool, 0-d or `[batch]`.
        copy: of the shape of `weight`, any dtype, or None.
        tile: how the product is cut.

    Raises:
        ValueError: shapes, dtypes or sizes that the kernel cannot take.
    """
    _check(weight, p, y)
    check_rates(weight, factor, step)
    batch, m, n = y.shape
    if tuple(weight.shape[1:]) != (m, n):
        weight, copy = weight.mT, None if copy is None else copy.mT
    tiles = triton.cdiv(m, tile.block) * triton.cdiv(n, tile.block)
    gate = active.expand(batch).contiguous().view(torch.uint8)
    squares = weight.new_zeros(batch, tiles)
    target = weight if copy is None else copy
    if weight.numel():
        finish_kernel[(batch * tiles,)](
            weight, target, p, y, squares, factor, step, gate,
            m, n, a,
            *weight.stride(), *target.stride(), *p.stride(), *y.stride(),
            COPY=copy is not None,
            **tile.constants(widen=INTERPRETED),
            **tile.options,
        )  # fmt: skip
    return squares.sum(1)


def _check(weight: Tensor, p: Tensor, y: Tensor) -> None:
    if weight.dtype != torch.float32:
        raise ValueError(f"weight must be float32, got {weight.dtype}")
    batch, m, n = y.shape
    shapes = tuple(weight.shape), tuple(p.shape), tuple(y.shape)
    if shapes[1] != (batch, m, m) or shapes[0] not in ((batch, m, n), (batch, n, m)):
        raise ValueError(f"weight, p, y must be [b, m, n], [b, m, m], [b, m, n], got {shapes}")
    if p.dtype != y.dtype or y.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"p and y must be float32, bfloat16 or float16, of one dtype, got {p.dtype}, {y.dtype}"
        )
    if any(x.shape[1:].numel() >= 2**31 for x in (weight, p)):
        raise ValueError(f"a matrix must have less than 2^31 elements, got {shapes}")
