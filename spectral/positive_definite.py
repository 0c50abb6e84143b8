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
of 512 rows in 1.4 and 1.5 ms in blocks of 128 and 256, and in 1.6 by the library. For a CPU see
`block_rows`."""


class Block(NamedTuple):
    """Some rows of the factor of a stack of systems."""

    rows: slice
    inverse: Tensor  # [batch, size, size], of the diagonal block
    panel: Tensor | None  # [batch, size, rows after it]


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


def factorized_(k: Tensor) -> list[Block]:
    """Factorise `k` `[batch, n, n]`, symmetric and positive definite, for `solve`; overwrites it.

    Only the upper triangle is read. Where rounding leaves a system indefinite, its solutions are
    meaningless, possibly not finite, and the others' are not touched.
    """
    rows = k.shape[-1]
    blocks = blocks_of(rows, block_rows(rows, k.device))
    identity = torch.eye(blocks[0].stop, dtype=k.dtype, device=k.device)
    factor = []
    for part in blocks:
        inverse = _inverse_factor(k[:, part, part], identity)
        panel = None
        if part.stop < rows:
            panel = torch.bmm(inverse, k[:, part, part.stop :])
            for row in blocks:
                if row.start >= part.stop:  # the lower triangle is not read
                    columns = panel[:, :, row.start - part.stop :]
                    left = columns[:, :, : row.stop - row.start]
                    k[:, row, row.start :].baddbmm_(left.mT, columns, alpha=-1)
        factor.append(Block(part, inverse, panel))
    return factor


def solve(factor: Sequence[Block], x: Tensor) -> Tensor:
    """Solve `Y K = X` for `x` `[batch, vectors, n]`."""
    b = x.clone()
    for rows, inverse, panel in factor:
        b[:, :, rows] = torch.bmm(b[:, :, rows], inverse.mT)
        if panel is not None:
            b[:, :, rows.stop :].baddbmm_(b[:, :, rows], panel, alpha=-1)
    for rows, inverse, panel in reversed(factor):
        top = b[:, :, rows]
        if panel is not None:
            top.baddbmm_(b[:, :, rows.stop :], panel.mT, alpha=-1)
        b[:, :, rows] = torch.bmm(top, inverse)
    return b


def _inverse_factor(k: Tensor, identity: Tensor) -> Tensor:
    """Compute `L^-1` of the Cholesky factors `L` of `k` `[batch, n, n]`; `identity` is as large."""
    # Of both triangles this reads the upper one; without a check, which the host would wait for.
    factor = torch.linalg.cholesky_ex(k, upper=True).L
    n = k.shape[-1]
    inverse: Tensor = torch.linalg.solve_triangular(
        factor.mT, identity[:n, :n].expand_as(factor), upper=False
    )
    return inverse
