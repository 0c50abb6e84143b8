"""Solutions of stacks of positive definite systems with few right-hand sides, without a host sync.

Written in blocks of products, so that a device makes a number of launches that grows with the rows
alone, whatever the number of systems, and spends its time in products rather than in columns.
"""

import torch
from torch import Tensor

BLOCKS = ((1024, 256), (1 << 31, 512))
"""Up to how many rows systems are factorised in blocks of how many. Larger blocks take fewer
launches, smaller ones fewer of the library's slow columns."""


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
    parts = blocks_of(rows)
    inverses, panels = [], []
    for part in parts:
        inverse = _inverse_factor(k[:, part, part])
        top = torch.bmm(inverse, b[:, part])
        b[:, part] = top
        inverses.append(inverse)
        if part.stop < rows:
            rest = slice(part.stop, rows)
            panel = torch.bmm(inverse, k[:, part, rest])
            k[:, rest, rest].baddbmm_(panel.mT, panel, alpha=-1)
            b[:, rest].baddbmm_(panel.mT, top, alpha=-1)
            panels.append(panel)
    for i, part in reversed(list(enumerate(parts))):
        top = b[:, part]
        if part.stop < rows:
            top = torch.baddbmm(top, panels[i], b[:, part.stop :], alpha=-1)
        b[:, part] = torch.bmm(inverses[i].mT, top)
    return b


def _inverse_factor(k: Tensor) -> Tensor:
    """Compute `L^-1` of the Cholesky factors `L` of `k` `[batch, n, n]`."""
    # Of both triangles this reads the upper one; without a check, which the host would wait for.
    factor = torch.linalg.cholesky_ex(k, upper=True).L
    identity = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    inverse: Tensor = torch.linalg.solve_triangular(
        factor.mT, identity.expand_as(factor), upper=False
    )
    return inverse
