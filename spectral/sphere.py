"""The spectral sphere `||W||_2 = R`: its radius, retractions onto it, and initialisation on it."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

Scale = Literal["spectral_mup", "align_adam_rms", "spectral_kaiming"]
SCALES: dict[Scale, Callable[[int, int], float]] = {
    "spectral_mup": lambda rows, cols: math.sqrt(rows / cols),
    "align_adam_rms": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    "spectral_kaiming": lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
}
"""Update scale of a `[rows, cols]` matrix; the radius is a multiple of this scale (SSO paper,
eqs. 7 and 16). With spectral_mup, updates change hidden features by the same RMS at every width;
with align_adam_rms, updates have an RMS of 0.2, as is typical of AdamW."""


def radius(shape: Sequence[int], mode: Scale = "spectral_mup", scaler: float = 1.0) -> float:
    """Compute a unit's radius: `scaler` times the scale for the unit's full `shape`."""
    return scaler * SCALES[mode](*shape)


def _usable(factor: Tensor) -> Tensor:
    """Set each entry of `factor` `[batch]` to 1 unless it is positive and finite."""
    return factor.masked_fill(~((factor > 0) & (factor < float("inf"))), 1)


def hard_factor(sigma: Tensor, radius: float | Tensor) -> Tensor:
    """Compute `radius / sigma` `[batch]` (SSO paper, eq. 13). `radius` is a number or `[batch]`.

    The factor is 1 where `sigma` is zero or not finite.
    """
    return _usable((radius / sigma).to(sigma.dtype))


def dynamic_factor(
    sigma: Tensor, radius: float | Tensor, *, rate: float, lr: float | Tensor
) -> Tensor:
    """Compute `1 + rate lr sign(radius - sigma)` `[batch]` (SSO paper, eq. 34).

    `radius` is a number or `[batch]`; `lr` is a number, 0-d or `[batch]`. The factor is 1 where
    `sigma == radius` or `sigma` is not finite.
    """
    return _usable((1 + rate * lr * torch.sign(radius - sigma)).to(sigma.dtype))


@torch.no_grad()
def spectral_init_(
    weight: Tensor, *, mode: Scale = "spectral_mup", generator: torch.Generator | None = None
) -> Tensor:
    """Fill `weight` `[..., rows, cols]` with Gaussian matrices of spectral norm `radius`.

    `W = R G / ||G||_2` with exact norms from a float64 SVD (SSO paper, section on initialisation).
    The scale of the Gaussian is irrelevant. Each matrix in the stack is a separate unit.
    """
    rows, cols = weight.shape[-2:]
    weight.normal_(generator=generator)
    sigma = torch.linalg.matrix_norm(weight.double(), ord=2, keepdim=True)
    return weight.mul_((radius((rows, cols), mode) / sigma).to(weight.dtype))
