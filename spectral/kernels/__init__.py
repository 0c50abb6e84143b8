"""Symmetric products of stacks of matrices, by the library or by Triton kernels.

`dispatch` decides which, from a table; `library` is the CPU path and the kernels' reference. Only
`symmetric` and `update` import triton, and only when a kernel is chosen.
"""

import torch
from torch import Tensor

from spectral.kernels import library
from spectral.kernels.dispatch import Operation, Tile, choose

__all__ = ["commuting", "gram", "polynomial"]


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


def _tile(operation: Operation, *operands: Tensor) -> Tile | None:
    """The kernel's tile, None for the library, which alone can be differentiated."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        return None
    return choose(operation, operands[0]).tile
