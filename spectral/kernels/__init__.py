"""Batched matmuls by cuBLAS or MKL (`library`), or by Triton kernels.

`dispatch` selects the implementation from a table. `library` is the CPU path and the reference for
the kernels. The kernel modules, which import triton, are only imported when a kernel is selected.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..batching import concat
from . import library
from .dispatch import Operation, Tile, choose, device_name, has_triton, listed


def gram(*stacks: Tensor) -> Tensor:
    """Compute `X X^T` of each stack `[batch, rows, cols]`, concatenated along the batch.

    The result is `[sum of batches, rows, rows]`. Stacks must have equal row counts and dtypes, and
    may have any strides.
    """
    tile = _gram_tile(stacks)
    if tile is None:
        return concat([*map(library.symmetric, stacks)])
    from . import symmetric

    if len(stacks) > 1:
        return symmetric.grams(stacks, tile)
    return symmetric.product(stacks[0], stacks[0], tile)


def mirrors(stacks: Sequence[Tensor]) -> bool:
    """Return whether `gram(*stacks)` computes one triangle of each product and mirrors it."""
    return _gram_tile(stacks) is not None


def commuting(p: Tensor, q: Tensor, a: float = 0.0) -> Tensor:
    """Compute `p q + a I` for symmetric matrices `p` and `q` `[batch, n, n]` that commute, such as
    polynomials of the same matrix."""
    tile = _tile("commuting", p, q)
    if tile is None:
        return library.symmetric(p, q, diagonal=a)
    from . import symmetric

    return symmetric.product(p, q, tile, gamma=a)


def polynomial(r: Tensor, b: float, c: float, a: float = 0.0) -> Tensor:
    """Compute `a I + b R + c R^2` `[batch, n, n]` for symmetric `r` `[batch, n, n]`."""
    tile = _tile("polynomial", r)
    if tile is None:
        return library.symmetric(r, r, r, alpha=c, beta=b, diagonal=a)
    from . import symmetric

    return symmetric.product(r, r, tile, r, alpha=c, beta=b, gamma=a)


def updates(tensors: Sequence[Tensor]) -> bool:
    """Return whether the kernels `update_` and `average_` can process all `tensors`.

    Triton must be installed, the device must be in the table, and all tensors must be float32 and
    contiguous. Slices of a stack and views of a tall convolution are not contiguous.
    """
    if not (listed(device_name(tensors[0].device)) and has_triton()):
        return False
    return all(x.dtype == torch.float32 and x.is_contiguous() for x in tensors)


def _gram_tile(stacks: Sequence[Tensor]) -> Tile | None:
    """Return the tile with which `gram` multiplies the stacks, or None to use the library."""
    return _tile("gram" if len(stacks) == 1 else "grouped", *stacks)


def _tile(operation: Operation, *operands: Tensor) -> Tile | None:
    """Return the kernel's tile, or None to use the library, which is required for autograd."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        return None
    # Only read shapes on listed devices: under tracing, they may be unknown.
    if not listed(device_name(operands[0].device)):
        return None
    return choose(operation, operands if operation == "grouped" else operands[:1])
