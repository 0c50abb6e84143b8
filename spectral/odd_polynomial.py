"""Odd polynomials of singular values: published coefficients, fitting, evaluation and gradient.

g(x) = a_0 x + a_1 x^3 + ... acts on a matrix as g(X) = X p(X^T X) = p(X X^T) X, where
p(y) = a_0 + a_1 y + ... is evaluated by Horner's rule on the smaller Gram matrix. Source: "PC
Layer: Polynomial Weight Preconditioning for Improving LLM Pre-Training", section 3 and algorithm 2.
The gradient is derived here.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from . import kernels
from .polar import SCHEDULES

Stage = tuple[float, ...]  # an odd polynomial's coefficients of x, x^3, x^5, ...
Level = int | str | Sequence[float]

PRESETS: Mapping[int, Stage] = MappingProxyType(
    {
        0: (1.0,),
        1: (1.507, -0.507),
        2: (2.083, -1.643, 0.560),
        3: (2.909, -4.649, 4.023, -1.283),
        4: (3.625, -9.261, 14.097, -10.351, 2.890),
    }
)
"""Published coefficients by level: 0 is the identity; 1 to 4 have cutoffs 0.8, 0.6, 0.4 and 0.3."""

COMPOSITES: Mapping[str, tuple[Stage, ...]] = MappingProxyType(
    {"over_flattening": SCHEDULES["polar_express_upstream"].coefficients}
)
"""Named compositions of polynomials. `over_flattening` is an ablation in the paper: eight Polar
Express steps, which map every singular value above about 1e-4 of the largest to 1. This ablation
gives a higher loss than a model without PC layers."""


def stages(level: Level) -> tuple[Stage, ...]:
    """Return the odd polynomials of a level, in the order they are applied.

    `level` is a preset from 0 to 4, a key of `COMPOSITES`, or a list of coefficients of x, x^3,
    x^5, ... Raises ValueError for any other level.
    """
    if isinstance(level, str):
        if level not in COMPOSITES:
            raise ValueError(f"level must be 0 to 4 or one of {sorted(COMPOSITES)}, got {level!r}")
        return COMPOSITES[level]
    if isinstance(level, int):
        if level not in PRESETS:
            raise ValueError(f"level must be one of {sorted(PRESETS)}, got {level}")
        return (PRESETS[level],)
    if len(level) == 0:
        raise ValueError("level must contain at least one coefficient, got none")
    values = tuple(float(c) for c in level)
    if not all(map(math.isfinite, values)):
        raise ValueError(f"the coefficients in level must be finite, got {values}")
    return (values,)


def evaluate(x: Tensor, level: Level) -> Tensor:
    """Evaluate g, the map applied to singular values, elementwise on `x` of any shape."""
    for coefficients in stages(level):
        square = x * x
        p = torch.full_like(x, coefficients[-1])
        for c in reversed(coefficients[:-1]):
            p = p * square + c
        x = x * p
    return x


def fit_polynomial(
    degree: int, cutoff: float, alpha: float = 4.0, interval: tuple[float, float] = (0.0, 1.1)
) -> Stage:
    """Fit an odd polynomial to min(x / cutoff, 1). Return `degree` + 1 coefficients of x, x^3, ...

    The fit minimises the integral of x^alpha (g(x) - target(x))^2 over `interval`, subject to
    g(1) = 1. The constraint eliminates a_0, leaving an ordinary least squares problem. For integer
    alpha, Gauss-Legendre quadrature on either side of `cutoff` gives the exact integral. With
    alpha = 4, the result matches the published presets to 5e-3 on the interval ("PC Layer",
    algorithm 2). The paper specifies neither alpha nor the sample points.

    Raises:
        ValueError: if `degree < 0`, `alpha < 0`, or not `0 <= interval[0] < cutoff < interval[1]`.
    """
    low, high = interval
    if degree < 0:
        raise ValueError(f"degree must be >= 0, got {degree}")
    if alpha < 0:
        raise ValueError(f"alpha must be >= 0, got {alpha}")
    if not 0 <= low < cutoff < high:
        raise ValueError(
            "interval and cutoff must satisfy 0 <= interval[0] < cutoff < interval[1], got "
            f"{interval} and {cutoff}"
        )
    # The nodes of Gauss-Legendre quadrature on [-1, 1] are the eigenvalues of the Jacobi matrix,
    # whose eigenvectors determine the weights (Golub & Welsch, 1969).
    count = 2 * degree + 2 + math.ceil(alpha / 2) + 32
    k = torch.arange(1, count, dtype=torch.float64, device="cpu")
    off = k / (4 * k * k - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    weights = 2 * vectors[0].square()
    halves = [(low, cutoff), (cutoff, high)]
    x = torch.cat([(b - a) / 2 * nodes + (a + b) / 2 for a, b in halves])
    root = (torch.cat([(b - a) / 2 * weights for a, b in halves]) * x**alpha).sqrt()
    if degree == 0:
        return (1.0,)
    basis = torch.stack([root * (x ** (2 * j + 1) - x) for j in range(1, degree + 1)], 1)
    residual = root * ((x / cutoff).clamp_max(1.0) - x)
    fitted = torch.linalg.lstsq(basis, residual[:, None], driver="gelsd").solution
    free: list[float] = fitted[:, 0].tolist()
    return (1.0 - math.fsum(free), *free)


def _horner(b: Tensor, coefficients: Stage) -> list[Tensor]:
    """Compute the Horner iterates P_0 ... P_{k-1} of p(B), each `[..., n, n]`; P_0 = p(B).

    Requires k >= 1. The constant last iterate, P_k = a_k I, is not computed.
    """
    p = b * coefficients[-1]
    p.diagonal(dim1=-2, dim2=-1).add_(coefficients[-2])
    iterates = [p]
    for c in reversed(coefficients[:-2]):
        p = kernels.commuting(_stack(b), _stack(p), c).view(b.shape)
        iterates.append(p)
    return iterates[::-1]


def _gram(x: Tensor) -> Tensor:
    """Compute the smaller Gram matrix of `[..., rows, cols]`: X^T X if rows >= cols, else X X^T."""
    short = x.mT if x.shape[-2] >= x.shape[-1] else x
    gram = kernels.gram(_stack(short))
    return gram.view(*x.shape[:-2], *gram.shape[-2:])


def _stack(x: Tensor) -> Tensor:
    """Reshape `[..., n, m]` to `[batch, n, m]`."""
    return x.flatten(0, -3) if x.ndim > 2 else x[None]


def apply_stage(x: Tensor, coefficients: Stage) -> Tensor:
    """Apply one odd polynomial to `x` `[..., rows, cols]`: g(X) = X p(X^T X) = p(X X^T) X."""
    if len(coefficients) == 1:
        return x * coefficients[0]
    p = _horner(_gram(x), coefficients)[0]
    return x @ p if x.shape[-2] >= x.shape[-1] else p @ x


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Compute Frobenius inner products `[..., 1, 1]` of `[..., rows, cols]`."""
    return (a * b).sum((-2, -1), keepdim=True)


def stage_vjp(x: Tensor, grad: Tensor, coefficients: Stage) -> tuple[Tensor, Tensor]:
    """Compute <grad, g(X)> `[..., 1, 1]` and its gradient in X, for one odd polynomial g.

    `x`, `grad` and the gradient are `[..., rows, cols]`. For a tall X, with K = X^T grad, B = X^T
    X, Horner iterates P_i and D = sum_i (B^i K) P_{i+1}^T, the value is <K, P_0> and the gradient
    is grad P_0 + X (D + D^T). A wide X is treated as the transpose of a tall X.
    """
    if len(coefficients) == 1:
        return coefficients[0] * inner(grad, x), grad * coefficients[0]
    tall = x.shape[-2] >= x.shape[-1]
    b = _gram(x)
    k = x.mT @ grad if tall else grad @ x.mT
    iterates = _horner(b, coefficients)
    value = inner(k, iterates[0])
    d = torch.zeros_like(k)
    for p in iterates[1:]:
        d = d + k @ p
        k = b @ k
    d = d + k * coefficients[-1]
    symmetric = d + d.mT
    if tall:
        return value, grad @ iterates[0] + x @ symmetric
    return value, iterates[0] @ grad + symmetric @ x
