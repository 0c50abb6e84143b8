"""Triton kernel of a matrix rule's last pass: decay, update of the weights, norm of the update.

    W <- (1 - lr decay) W - step D,    and sum D^2 per program,

and a copy of W in the dtype that the model reads, in one pass over W and D instead of one for each:
10 bytes of an element are moved for a float32 W and a 16-bit D, 12 with a 16-bit copy. Learning
rate, decay and the predicate are read on the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def update_kernel(  # type: ignore[no-untyped-def]
    weight, copy, direction, squares, factor, step, active,
    numel, cols, parts,
    d_batch, d_row, d_col,
    c_batch, c_row, c_col,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One part of one matrix of `weight` `[batch, numel]`, contiguous."""
    matrix = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    place = part * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    w = tl.load(weight + matrix * numel + place, mask=inside, other=0.0)
    source = direction + matrix * d_batch + (place // cols) * d_row + (place % cols) * d_col
    d = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    tl.store(squares + tl.program_id(0), tl.sum(d * d, axis=0))
    new = w * tl.load(factor) - d * tl.load(step)
    # A selection, not a product: NaN of a unit that is skipped must not reach the weights.
    taken = tl.load(active + matrix) != 0
    new = tl.where(taken, new, w)
    tl.store(weight + matrix * numel + place, new, mask=inside)
    if COPY:
        target = copy + matrix * c_batch + (place // cols) * c_row + (place % cols) * c_col
        moved = inside & taken
        tl.store(target, new.to(copy.dtype.element_ty), mask=moved)


def update_(
    weight: Tensor,
    direction: Tensor,
    factor: Tensor,
    step: Tensor,
    active: Tensor,
    copy: Tensor | None = None,
) -> Tensor:
    """||D||^2 `[batch]`; `weight <- factor weight - step direction` in place where `active`, and
    `copy`, of its shape, any strides and dtype, the same, rounded.

    `weight` `[batch, rows, cols]`, float32, contiguous; `direction` of its shape, of any strides
    and any of the kernels' dtypes; `factor`, `step` 0-d float32, `active` 0-d or
    `[batch]` bool, on its device.
    """
    _check(weight, direction)
    batch, numel = weight.shape[0], weight.shape[1:].numel()
    parts = triton.cdiv(numel, BLOCK)
    gate = active.expand(batch).contiguous().view(torch.uint8)
    squares = weight.new_zeros(batch, parts)
    target = weight if copy is None else copy
    if weight.numel():
        update_kernel[(batch * parts,)](
            weight, target, direction, squares, factor, step, gate,
            numel, weight.shape[2], parts,
            *direction.stride(), *target.stride(),
            COPY=copy is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
    return squares.sum(1)


def _check(weight: Tensor, direction: Tensor) -> None:
    if weight.dtype != torch.float32 or weight.shape != direction.shape:
        raise ValueError(
            f"weight must be float32 of the direction's shape, got {weight.dtype} "
            f"{tuple(weight.shape)} and {tuple(direction.shape)}"
        )
    if not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous, got strides {weight.stride()}")
    if weight.shape[1:].numel() >= 2**31:
        raise ValueError(f"a matrix must have less than 2^31 elements, got {weight.shape[1:]}")
