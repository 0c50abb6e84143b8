"""Solutions of stacks of positive definite systems with few right-hand sides, without a host sync.

Written in blocks of products, so that a device makes a number of launches that grows with the rows
alone, whatever the number of systems, and spends its time in products rather than in columns.
"""

import torch
from torch import Tensor

BLOCKS = ((1024, 128), (1 << 31, 256))
"""Up to how many rows systems are factorised in blocks of how many. Larger blocks take fewer
launches, smaller ones fewer of the library's slow columns: twice as large ones take 1.4 to 2 times
as long in the model of an H100, and half as large ones are no faster."""


def blocks_of(rows: int) -> list[slice]:
    """Return the ranges of rows in which systems with `rows` of them are factorised."""
    size = next(block for most, block in BLOCKS if rows <= most)
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


def solve_(k: Tensor, b: Tensor) -> Tensor:
    """Solve `K X = B` for `k` `[batch, n, n]` and `b` `[batch, n, columns]`; overwrites both.

    `k` is symmetric and positive definite; only its upper triangle is read. Where rounding leaves
    it indefinite, that system's solution is meaningless, possibly not finite, and the others' are
    not touched.
    """
    rows = k.shape[-1]
    blocks = blocks_of(rows)
    identity = torch.eye(blocks[0].stop, dtype=k.dtype, device=k.device)
    factored = []
    for part in blocks:
        inverse = _inverse_factor(k[:, part, part], identity)
        top = torch.bmm(inverse, b[:, part])
        panel = None
        if part.stop < rows:
            rest = slice(part.stop, rows)
            panel = torch.bmm(inverse, k[:, part, rest])
            for row in blocks:
                if row.start >= part.stop:  # the lower triangle is not read
                    mine = panel[:, :, row.start - part.stop :]
                    left = mine[:, :, : row.stop - row.start]
                    k[:, row, row.start :].baddbmm_(left.mT, mine, alpha=-1)
            b[:, rest].baddbmm_(panel.mT, top, alpha=-1)
        factored.append((part, inverse, panel, top))
    for part, inverse, panel, top in reversed(factored):
        if panel is not None:
            top.baddbmm_(panel, b[:, part.stop :], alpha=-1)
        b[:, part].baddbmm_(inverse.mT, top, beta=0)
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
