"""Small model of `f(lambda) = <u v^T, msign(M + lambda u v^T)>` that holds for every lambda.

With `w = M v` and `N = M - w v^T`, so that `N v = 0`,

    (M + lambda u v^T) (M + lambda u v^T)^T = N N^T + y y^T,    y = w + lambda u.

Only the rank-one term depends on lambda, so one block Krylov space of `N N^T` from `[u, w]` serves
the whole search. msign's odd polynomial is expanded into partial fractions,
`p(s) ~ sum_j c_j s / (s^2 + t_j^2)`, and for each pole a continued fraction reduces the resolvent
of `N N^T` to its leading 2 x 2 block `C_j`. With the two coordinates of y, Sherman-Morrison gives

    f(lambda) = sum_j c_j (C_j y)_1 / (1 + y^T C_j y),

an explicit function of lambda without cancellation, eigenvalues, matrix functions or a host sync.
docs/solver.md has the derivation and the alternatives that were tried.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from spectral.constant_result import constant_result
from spectral.krylov import Tridiagonal, bidiagonalize, tridiagonalize, unit
from spectral.polar import chunk_size
from spectral.schedules import Coefficients

NODES = 40
RIDGE = 1e-11
ROUNDS = 4
GRAM_ROWS = 256
POINTS = 32


class Model(NamedTuple):
    """Rational function of each problem of a batch, float64."""

    block: Tensor  # [3, batch, nodes], entries 11, 12, 22 of C_j
    weight: Tensor  # [batch, nodes], residues c_j, scaled
    u: Tensor  # [batch], component of u along the first basis vector: |u|
    w: Tensor  # [2, batch], M v in the first block
    low: Tensor  # [batch], the bracket: the root lies in [low, high]
    high: Tensor  # [batch]


@constant_result
def partial_fractions(
    steps: tuple[Coefficients, ...],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Fit residues and nodes `(c, t)` with `p(s) ~ sum_j c_j s / (s^2 + t_j^2)` on [0, 1].

    Uses ridge least squares in float64 on a logarithmic grid. With eight steps the largest error is
    1.1e-4 for polar_express, 7e-4 for polar_express_upstream and 3e-2 for cans; schedules that
    oscillate are smoothed.
    """
    return _fit(steps)


@lru_cache
def _fit(steps: tuple[Coefficients, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    small = torch.logspace(-7, -4.5, 200, dtype=torch.float64)
    s = torch.cat((small, torch.logspace(-4.5, 0, 1500, dtype=torch.float64)))
    value = s
    for a, b, c in steps:
        value = value * (a + value.square() * (b + c * value.square()))
    t = torch.logspace(-5.5, 0.5, NODES, dtype=torch.float64)
    basis = t * s[:, None] / (s[:, None].square() + t.square())
    gram = basis.mT @ basis / len(s) + RIDGE * torch.eye(NODES, dtype=torch.float64)
    residues = t * torch.linalg.solve(gram, basis.mT @ value / len(s))
    return tuple(residues.tolist()), tuple(t.tolist())


@constant_result
def fractions_on(device: torch.device, steps: tuple[Coefficients, ...]) -> Tensor:
    """Return `partial_fractions` as `[2, nodes]`, float64, on `device`.

    Copied to the device once: a step that copied it would wait for the copy and could not be
    recorded as a CUDA graph.
    """
    return _fractions_on(device, steps)


@lru_cache
def _fractions_on(device: torch.device, steps: tuple[Coefficients, ...]) -> Tensor:
    return torch.tensor(partial_fractions(steps), dtype=torch.float64, device=device)


def build(m: Tensor, u: Tensor, v: Tensor, count: int, steps: tuple[Coefficients, ...]) -> Model:
    """Build the model of `m` `[batch, rows, cols]`, `rows <= cols`, by `count` block Krylov steps.

    `u` `[batch, rows]` and `v` `[batch, cols]` are unit or zero vectors.
    """
    w = (v[:, None] @ m.mT)[:, 0]
    z = (u[:, None] @ m)[:, 0]
    overlap = (u * w).sum(-1, keepdim=True)
    # |lambda* + overlap| <= hypot(overlap, p + q), by pinching; docs/solver.md.
    reach = torch.linalg.vector_norm(w - overlap * u, dim=-1) + torch.linalg.vector_norm(
        z - overlap * v, dim=-1
    )
    square = torch.linalg.vector_norm(m, dim=(-2, -1)).double().square()
    centre = -overlap[:, 0].double()
    # msign divides by ||M + lambda Theta||_F; near the root lambda is close to -overlap.
    scale = torch.maximum(square - centre.square(), 1e-6 * square).sqrt()
    scale = torch.where(scale > 0, scale, 1)
    residues, nodes = fractions_on(square.device, steps)
    projection = _project(m, u, v, w, count)
    half = torch.hypot(centre, reach.double())
    return Model(
        block=_resolvent(projection.diagonal, projection.lower, (scale[:, None] * nodes).square()),
        weight=scale[:, None] * residues,
        u=(projection.left[:, 0] * u).sum(-1).double(),
        w=torch.einsum("bin,bn->ib", projection.left[:, :2], w.to(projection.left.dtype)).double(),
        low=centre - half,
        high=centre + half,
    )


def _project(m: Tensor, u: Tensor, v: Tensor, w: Tensor, count: int) -> Tridiagonal:
    """Project `N N^T` on its Krylov basis from `[u, w]`, block tridiagonal in float64.

    With few rows from the Gram matrix in float64, whose products cost much less than those with M.
    With many rows by bidiagonalisation of N in its own precision, squared only afterwards.
    """
    if m.shape[1] <= GRAM_ROWS:
        gram, image = _gram(m, unit(v.double()))
        return tridiagonalize(gram, u.double(), image, count)
    projection = bidiagonalize(m, u, w, count, null=v)
    diagonal, lower = projection.diagonal.double(), projection.lower.double()
    blocks = diagonal @ diagonal.mT
    blocks[:, 1:] += lower @ lower.mT
    return Tridiagonal(projection.left, blocks, lower @ diagonal[:, :-1].mT)


def _gram(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `N N^T` and `M v` in float64, for float64 unit vectors `v`, chunk by chunk.

    `N N^T` stays positive only if both come from the same float64 M and an exact unit vector.
    """
    size = chunk_size(m.shape[1], m.shape[2], m.device)
    grams, images = [], []
    for part, direction in zip(torch.split(m, size), torch.split(v, size), strict=True):
        wide = part.double()
        image = (direction[:, None] @ wide.mT)[:, 0]
        grams.append(wide @ wide.mT - image[:, :, None] * image[:, None])
        images.append(image)
    return torch.cat(grams), torch.cat(images)


def _resolvent(blocks: Tensor, coupling: Tensor, shift: Tensor) -> Tensor:
    """Compute entries 11, 12, 22 of the leading 2 x 2 block of `(T + shift)^-1`.

    `T` is block tridiagonal with diagonal `blocks` `[batch, steps, 2, 2]` and `coupling`
    `[batch, steps - 1, 2, 2]` below it; `shift` and the result's last two dimensions are
    `[batch, nodes]`. Evaluates the block continued fraction from the last block up.
    """
    current = shift.new_zeros(3, *shift.shape)
    for step in reversed(range(blocks.shape[1])):
        k11, k12, k22 = (blocks[:, step, i, j, None] for i, j in ((0, 0), (0, 1), (1, 1)))
        k11, k22 = k11 + shift, k22 + shift
        if step + 1 < blocks.shape[1]:
            b11, b12, b21, b22 = coupling[:, step].flatten(1)[:, :, None].unbind(1)
            c11, c12, c22 = current
            left1, left2 = c11 * b11 + c12 * b21, c12 * b11 + c22 * b21  # C B, first column
            right1, right2 = c11 * b12 + c12 * b22, c12 * b12 + c22 * b22  # C B, second column
            k11 = k11 - (b11 * left1 + b21 * left2)
            k12 = k12 - (b11 * right1 + b21 * right2)
            k22 = k22 - (b12 * right1 + b22 * right2)
        current = torch.stack((k22, (-k12).expand_as(k22), k11)) / (k11 * k22 - k12 * k12)
    return current


def value(model: Model, multiplier: Tensor) -> Tensor:
    """Evaluate the model, `[batch, points]`, at `multiplier` `[batch, points]`."""
    c11, c12, c22 = model.block[:, :, None]  # each [batch, 1, nodes]
    y1 = model.w[0][:, None, None] + multiplier[:, :, None] * model.u[:, None, None]
    y2 = model.w[1][:, None, None]
    first, second = c11 * y1 + c12 * y2, c12 * y1 + c22 * y2
    terms = first / (1 + y1 * first + y2 * second) * model.weight[:, None]
    total: Tensor = model.u[:, None] * terms.sum(-1)
    return total


def root(model: Model, target: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Find `(lambda, slope)` `[batch]` with `f(lambda) = target` between `low` and `high`.

    `f` does not decrease, so a few rounds on ever finer grids enclose the root; the last interval
    is interpolated linearly.
    """
    fractions = torch.linspace(0, 1, POINTS + 1, dtype=torch.float64, device=low.device)
    for _ in range(ROUNDS):
        grid = low[:, None] + (high - low)[:, None] * fractions
        f = value(model, grid) - target[:, None]
        last = (f <= 0).sum(-1, keepdim=True).clamp(1, POINTS)
        low, high = grid.gather(1, last - 1)[:, 0], grid.gather(1, last)[:, 0]
        f_low, f_high = f.gather(1, last - 1)[:, 0], f.gather(1, last)[:, 0]
    width, rise = high - low, f_high - f_low
    slope = rise / torch.where(width > 0, width, 1)
    fraction = (-f_low / torch.where(rise > 0, rise, 1)).clamp(0, 1)
    return low + fraction * width, slope


def take(model: Model, index: int, size: int) -> Model:
    """Return the model of batch entries `[index * size, (index + 1) * size)`."""
    part = slice(index * size, (index + 1) * size)
    return Model(
        model.block[:, part],
        model.weight[part],
        model.u[part],
        model.w[:, part],
        model.low[part],
        model.high[part],
    )


def join(models: list[Model]) -> Model:
    """Concatenate models along the batch."""
    fields = zip(*models, strict=True)
    dims = (1, 0, 0, 1, 0, 0)
    return Model(*(torch.cat(parts, dim) for parts, dim in zip(fields, dims, strict=True)))
