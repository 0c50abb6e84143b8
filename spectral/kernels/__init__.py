"""Products of stacks of matrices, by the library or by Triton kernels.

`dispatch` chooses from a table; `library` is the CPU path and the reference of the kernels. Only
the kernels' own modules import triton, and only when a kernel is chosen.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..joined_stacks import apart, together
from . import library
from .dispatch import (
    VECTORS,
    Operation,
    Tile,
    choose,
    device_name,
    fused_update,
    listed,
    small_problem,
)

__all__ = [
    "VECTORS",
    "commuting",
    "device_name",
    "gram",
    "grams",
    "listed",
    "mirrors",
    "orthonormal",
    "polynomial",
    "root",
    "top_eigenvector",
    "update_",
    "updates",
]


def gram(x: Tensor) -> Tensor:
    """Compute `X X^T` `[batch, rows, rows]` of `x` `[batch, rows, cols]`, any strides."""
    tile = _tile("gram", x)
    if tile is None:
        return library.gram(x)
    from . import symmetric

    return symmetric.gram(x, tile)


def grams(stacks: Sequence[Tensor]) -> Tensor:
    """Compute `X X^T` of each stack `[batch, rows, cols]`, concatenated along the batch.

    The result is `[sum of batches, rows, rows]`; the stacks agree in rows and dtype.
    """
    if len(stacks) == 1:
        return gram(stacks[0])
    tile = _tile("grouped", *stacks)
    if tile is None:
        return library.grams(stacks)
    from . import grouped

    return grouped.grams(stacks, tile)


def mirrors(stacks: Sequence[Tensor]) -> bool:
    """Return whether `grams` of the stacks computes one triangle and mirrors it."""
    return _tile("gram" if len(stacks) == 1 else "grouped", *stacks) is not None


def top_eigenvector(t: Tensor, squarings: Sequence[int], tiny: float) -> Tensor | None:
    """Compute the top eigenvector `[batch, k]` of symmetric `t` `[batch, k, k]`, float64.

    Squares `squarings` times after each division by the largest entry, or by `tiny`. None if there
    is no kernel, so that the library has to do it.
    """
    if not small_problem(t.shape[-1], device_name(t.device)):
        return None
    from . import small

    return small.top_eigenvector(t, squarings, tiny)


def root(
    block: Tensor, weight: Tensor, half: Tensor, rounds: int, points: int
) -> tuple[Tensor, Tensor] | None:
    """Find the root and the slope there, `[batch]`, of `spectral.tangent_model.value`.

    On `rounds` grids of `points` intervals, the first in `[-half, half]`; the arguments are those
    of `spectral.tangent_model.Model`. None where there is no kernel and the library has to do it.
    """
    if not small_problem(weight.shape[-1], device_name(weight.device)):
        return None
    from . import small

    return small.root(block, weight, half, rounds, points)


def orthonormal(x: Tensor, dependent: float) -> Tensor | None:
    """Orthonormalise the rows of `x` `[batch, count, n]` as `spectral.krylov.orthonormal` does.

    None where there is no kernel and the library has to do it.
    """
    if x.shape[1] > VECTORS or not small_problem(x.shape[1], device_name(x.device)):
        return None
    from . import small

    return small.orthonormal(x, dependent)


def commuting(p: Tensor, q: Tensor, a: float = 0.0) -> Tensor:
    """Compute `P Q + a I` `[batch, n, n]` of symmetric `p` and `q` that commute.

    Polynomials of one matrix do.
    """
    tile = _tile("commuting", p, q)
    if tile is None:
        return library.commuting(p, q, a)
    from . import symmetric

    return symmetric.commuting(p, q, a, tile)


def polynomial(r: Tensor, b: float, c: float, a: float = 0.0) -> Tensor:
    """Compute `a I + b R + c R^2` `[batch, n, n]` of symmetric `r` `[batch, n, n]`."""
    tile = _tile("polynomial", r)
    if tile is None:
        return library.polynomial(r, b, c, a)
    from . import symmetric

    return symmetric.polynomial(r, b, c, a, tile)


def update_(
    weights: Sequence[Tensor],
    directions: Sequence[Tensor],
    *,
    step: Tensor,
    factor: Tensor,
    active: Tensor,
    scale: Tensor | None = None,
    cautious: bool = False,
) -> Tensor:
    """Update stacks of any shapes in one pass each; return ||direction|| `[sum of batches]`.

    `weight <- factor weight - step direction` in place where `active`; `step`, `factor`, float32,
    and `active` have an entry for each matrix of all stacks. With `scale`, which is like `factor`,
    all weights are multiplied by it before. `cautious`: no factor where weight and direction
    have opposite signs. Only where `updates` is True.
    """
    from . import update

    rates = zip(*(apart(x, weights) for x in (factor, step, active)), strict=True)
    scales = [None] * len(weights) if scale is None else apart(scale, weights)
    squares = [
        update.update_(w, d, decay, size, gate, part, cautious)
        for w, d, (decay, size, gate), part in zip(weights, directions, rates, scales, strict=True)
    ]
    return together(squares).sqrt()


def updates(weights: Sequence[Tensor]) -> bool:
    """Return whether `update_` has a kernel for all of the weights.

    A slice of a stack, or a view of a tall convolution, is not contiguous.
    """
    name = device_name(weights[0].device)
    return all(fused_update(w.dtype, name) and w.is_contiguous() for w in weights)


def _tile(operation: Operation, *operands: Tensor) -> Tile | None:
    """Return the kernel's tile, None for the library, which alone can be differentiated."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        return None
    # Shapes are not read where they do not matter: a traced one may be unknown.
    if not listed(device_name(operands[0].device)):
        return None
    return choose(operation, operands if operation == "grouped" else operands[:1])
