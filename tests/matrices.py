"""Matrices with known spectra, and msign, the Gram penalty and stable ranks by definition."""

import torch
from torch import Tensor

from spectral.polar import coefficients


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    """Draw float64 samples that only depend on the seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spectrum(values: Tensor, rows: int, cols: int, seed: int = 0) -> Tensor:
    """Return a float64 matrix with the given singular values."""
    u = torch.linalg.qr(gaussian(rows, len(values), seed=seed)).Q
    v = torch.linalg.qr(gaussian(cols, len(values), seed=seed + 1)).Q
    return u @ torch.diag(values) @ v.mT


def scalar_map(s: Tensor, schedule: str, steps: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Apply the msign polynomials for `dtype` to numbers, one after the other."""
    for a, b, c in coefficients(schedule, steps, dtype):
        s = a * s + b * s**3 + c * s**5
    return s


def msign_by_svd(
    x: Tensor, schedule: str, steps: int, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Apply the msign polynomials for `dtype` to the singular values, in float64."""
    u, s, vh = torch.linalg.svd(x / torch.linalg.matrix_norm(x, keepdim=True), full_matrices=False)
    return u @ torch.diag_embed(scalar_map(s, schedule, steps, dtype)) @ vh


def penalty_by_definition(
    w: Tensor, power: int = 2, side: str = "in", normalize: str | None = None
) -> Tensor:
    """Compute the Gram penalty of `[..., rows, cols]`."""
    gram = w.mT @ w if side == "in" else w @ w.mT
    n = gram.shape[-1]
    energy = (gram * (1 - torch.eye(n, dtype=w.dtype))).square().sum((-2, -1))
    if normalize == "frobenius":
        energy = energy / w.square().sum((-2, -1)).square()
    elif normalize == "size":
        energy = energy / (n * (n - 1))
    return energy if power == 2 else energy.sqrt()


def stable_rank(matrix: Tensor) -> float:
    """Compute ||A||_F^2 / ||A||_2^2 from float64 singular values."""
    values = torch.linalg.svdvals(matrix.double())
    return float(values.square().sum() / values[0].square())
