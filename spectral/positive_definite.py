"""Solutions of stacks of positive definite systems with few right-hand sides, without a host sync.

Written in blocks of products, so that a device makes a number of launches that grows with the rows
alone, whatever the number of systems, and spends its time in products rather than in columns.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
"""Rows of a block, but on a CPU. Larger blocks take fewer launches, smaller ones fewer of the
library's slow columns. On an H200 48 systems of 2,048 rows in float64 are factorised and solved in
11.0, 9.9, 14.0 and 22.8 ms in blocks of 128, 256, 512 and 1,024, and in 24.6 ms by the library; 48
of 512 rows in 1.4 and 1.5 ms in blocks of 128 and 256, and in 1.6 by the library (measured with a
product for each pair of blocks). For a CPU see `block_rows`."""
JOINED = 4
"""Blocks that are joined for `solve`, but on a CPU: up to 1,024 rows are then solved in two
launches. Of 2,048 rows the inverses take a quarter of the FLOPs of the factor, and half its memory.
"""


class Block(NamedTuple):
    """Some rows of the factor L of a stack of systems `K = L L^T`."""

    rows: slice
    inverse: Tensor  # [batch, size, size], of the diagonal block
    left: Tensor  # [batch, size, rows before it], the blocks left of it
    below: Tensor  # [batch, rows after it, size]


def blocks_of(rows: int, size: int = BLOCK) -> list[slice]:
    """Return the ranges of rows in which systems with `rows` of them are factorised."""
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


def block_rows(rows: int, device: torch.device) -> int:
    """Return the rows of a block of systems with `rows` of them.

    On an Intel Xeon with AVX-512, one thread, one float32 system of 256 rows is factorised in 0.29,
    0.42 and 0.55 ms in blocks of 64, 128 and 256, and in 0.32 by the library; one of 1,024 rows
    with five solves in 7.7, 6.6 and 7.2 ms, and in 20 by the library.
    """
    if device.type != "cpu":
        return BLOCK
    return 64 if rows < 512 else 128


def joined_blocks(device: torch.device) -> int:
    """Return how many blocks are joined for `solve`."""
    return 1 if device.type == "cpu" else JOINED


def factorized_(k: Tensor) -> list[Block]:
    """Factorise `k` `[batch, n, n]`, symmetric and positive definite, for `solve`; overwrites it.

    Only the upper triangle is read, and L takes the place of the lower one. Where rounding leaves a
    system indefinite, its solutions are meaningless, possibly not finite, and the others' are not
    touched.
    """
    rows = k.shape[-1]
    parts = blocks_of(rows, block_rows(rows, k.device))
    identity = torch.eye(parts[0].stop, dtype=k.dtype, device=k.device)
    blocks = []
    for part in parts:
        left, below = k[:, part, : part.start], k[:, part.stop :, part]
        if part.start:  # less what the columns before explain, in one product
            before = k[:, part.start :, : part.start]
            k[:, part, part.start :].baddbmm_(left, before.mT, alpha=-1)
        inverse = _inverse_factor(k[:, part, part], identity)
        if part.stop < rows:
            torch.bmm(k[:, part, part.stop :].mT, inverse.mT, out=below)
        blocks.append(Block(part, inverse, left, below))
    count = joined_blocks(k.device)
    return [_joined(k, blocks[i : i + count]) for i in range(0, len(blocks), count)]


def solve(factor: Sequence[Block], x: Tensor) -> Tensor:
    """Solve `Y K = X` for `x` `[batch, vectors, n]`."""
    y, z = torch.empty_like(x), torch.empty_like(x)
    for rows, inverse, left, _ in factor:
        right = x[:, :, rows]
        if rows.start:
            right = torch.baddbmm(right, z[:, :, : rows.start], left.mT, alpha=-1)
        torch.bmm(right, inverse.mT, out=z[:, :, rows])
    for rows, inverse, _, below in reversed(factor):
        right = z[:, :, rows]
        if below.shape[1]:
            right.baddbmm_(y[:, :, rows.stop :], below, alpha=-1)
        torch.bmm(right, inverse, out=y[:, :, rows])
    return y


def _joined(k: Tensor, blocks: Sequence[Block]) -> Block:
    """Return successive blocks of the factor in `k` as one."""
    if len(blocks) == 1:
        return blocks[0]
    rows = slice(blocks[0].rows.start, blocks[-1].rows.stop)
    size = rows.stop - rows.start
    joined = k.new_zeros(len(k), size, size)
    for part, inverse, left, _ in blocks:
        first = part.start - rows.start
        here = slice(first, part.stop - rows.start)
        joined[:, here, here] = inverse
        if first:
            across = torch.bmm(left[:, :, rows.start :], joined[:, :first, :first])
            joined[:, here, :first].baddbmm_(inverse, across, beta=0, alpha=-1)
    return Block(rows, joined, k[:, rows, : rows.start], k[:, rows.stop :, rows])


def _inverse_factor(k: Tensor, identity: Tensor) -> Tensor:
    """Compute `L^-1` of the Cholesky factors `L` of `k` `[batch, n, n]`; `identity` is as large."""
    # Of both triangles this reads the upper one; without a check, which the host would wait for.
    factor = torch.linalg.cholesky_ex(k, upper=True).L
    n = k.shape[-1]
    inverse: Tensor = torch.linalg.solve_triangular(
        factor.mT, identity[:n, :n].expand_as(factor), upper=False
    )
    return inverse
