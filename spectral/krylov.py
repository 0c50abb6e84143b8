"""Orthonormal block Krylov bases of `M M^T`, batched, without a host sync."""

import torch
from torch import Tensor


def block_krylov(m: Tensor, first: Tensor, second: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """`(Q, P)`: a basis `[batch, rows, 2 steps]`, its image `M^T Q` `[batch, cols, 2 steps]`.

    `Q` spans `{B, (M M^T) B, ...}` for `B = [first, second]`, both `[batch, rows]`, and has
    orthonormal columns, except that a column is zero where the space is exhausted (dependent start
    vectors, low rank, `2 steps > rows`). A zero column is inert in everything computed from `Q`
    and `P`. Two passes of full reorthogonalisation make float32 sufficient; see docs/solver.md.
    """
    batch, rows, cols = m.shape
    basis = m.new_zeros(batch, rows, 2 * steps)
    image = m.new_zeros(batch, cols, 2 * steps)
    block = torch.stack((first, second), dim=-1)  # [batch, rows, 2]
    for step in range(steps):
        here = slice(2 * step, 2 * step + 2)
        block = _orthonormal_block(block, basis[:, :, : 2 * step])
        basis[:, :, here] = block
        image[:, :, here] = m.mT @ block
        if step + 1 < steps:
            block = m @ image[:, :, here]
    return basis, image


def _orthonormal_block(block: Tensor, basis: Tensor) -> Tensor:
    """The two columns of `block`, made orthonormal to `basis` and to each other, or zero."""
    one, two = _unit(block[:, :, 0]), _unit(block[:, :, 1])
    both = torch.stack((one, two), dim=-1)
    for _ in range(2):
        both = both - basis @ (basis.mT @ both)
    one = _unit_or_zero(both[:, :, 0])
    two = _unit_or_zero(_without(both[:, :, 1], one))
    # The subtraction above may have cancelled digits; a last pass restores orthogonality.
    both = torch.stack((one, two), dim=-1)
    both = both - basis @ (basis.mT @ both)
    one, two = both[:, :, 0], both[:, :, 1]
    return torch.stack((_unit(one), _unit(_without(two, _unit(one)))), dim=-1)


def _without(x: Tensor, unit: Tensor) -> Tensor:
    return x - unit * (unit * x).sum(-1, keepdim=True)


def _unit(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(norm == 0, 1, norm)


def _unit_or_zero(x: Tensor) -> Tensor:
    """`x` `[batch, n]` at unit length, or zero where only rounding is left of a unit vector."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    alive = norm > 32 * torch.finfo(x.dtype).eps
    return torch.where(alive, x / torch.where(alive, norm, 1), 0)
