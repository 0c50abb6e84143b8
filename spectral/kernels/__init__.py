"""Symmetric products of stacks of matrices, by the library or by Triton kernels.

`dispatch` decides which, from a table; `library` is the CPU path and the kernels' reference. Only
`symmetric` and `update` import triton, and only when a kernel is chosen.
"""

import torch
from torch import Tensor

from spectral.kernels import library
from spectral.kernels.dispatch import Operation, Tile, choose, device_name, fused_update, listed

__all__ = ["commuting", "gram", "polynomial", "update_"]


def gram(x: Tensor) -> Tensor:
    """`X X^T` `[batch, rows, rows]` of `x` `[batch, rows, cols]`, any strides."""
    tile = _tile("gram", x)
    if tile is None:
        return library.gram(x)
    from spectral.kernels import symmetric

    return symmetric.gram(x, tile)


def commuting(p: Tensor, q: Tensor, a: float = 0.0) -> Tensor:
    """`P Q + a I` `[batch, n, n]` of symmetric `p`, `q` that commute, as polynomials of one matrix
    do."""
    tile = _tile("commuting", p, q)
    if tile is None:
        return library.commuting(p, q, a)
    from spectral.kernels import symmetric

    return symmetric.commuting(p, q, a, tile)


def polynomial(r: Tensor, b: float, c: float, a: float = 0.0) -> Tensor:
    """`a I + b R + c R^2` `[batch, n, n]` of symmetric `r` `[batch, n, n]`."""
    tile = _tile("polynomial", r)
    if tile is None:
        return library.polynomial(r, b, c, a)
    from spectral.kernels import symmetric

    return symmetric.polynomial(r, b, c, a, tile)


def update_(
    weight: Tensor,
    direction: Tensor,
    *,
    lr: float | Tensor,
    weight_decay: float | Tensor,
    scale: float,
    active: Tensor | None,
) -> Tensor | None:
    """||direction|| `[batch]`, and `weight <- (1 - lr weight_decay) weight - lr scale direction` in
    place where `active`, in one pass; or None, nothing done, where the library is to do it."""
    if fused_update(weight.dtype, device_name(weight.device)) is not None:
        return None
    if not weight.is_contiguous():  # a slice of a stack, or a view of a tall convolution
        return None
    from spectral.kernels import update

    step = weight.new_ones(()) * (lr * scale)
    factor = 1 - weight.new_ones(()) * (lr * weight_decay)
    gate = weight.new_ones((), dtype=torch.bool) if active is None else active
    return update.update_(weight, direction, factor, step, gate).sqrt()


def _tile(operation: Operation, *operands: Tensor) -> Tile | None:
    """The kernel's tile, None for the library, which alone can be differentiated."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        return None
    # Shapes are not looked at where they do not matter: a traced one may be unknown.
    if not listed(device_name(operands[0].device)):
        return None
    return choose(operation, operands[0]).tile
