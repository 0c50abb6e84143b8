"""The spectral sphere `||W||_2 = R`: its radius, retractions to it, and initialisation on it."""

import torch
from torch import Tensor

from .scaling import update_scale


def radius(shape: tuple[int, int], mode: str = "spectral_mup", scaler: float = 1.0) -> float:
    """Compute the radius of a `[rows, cols]` unit times `scaler` (SSO paper, eqs. 7 and 16).

    `shape` is that of the whole unit, never of a shard.

    Raises:
        ValueError: unknown mode, or `scaler <= 0`.
    """
    if not scaler > 0:
        raise ValueError(f"scaler must be positive, got {scaler}")
    return scaler * update_scale(shape, mode)


def _gate(factor: Tensor, active: Tensor | None) -> Tensor:
    """`factor` `[batch]`, 1 where it would leave nothing finite, or is not `active`."""
    usable = (factor > 0) & (factor < float("inf"))
    usable = usable if active is None else usable & active
    return factor.masked_fill(~usable, 1)


def retract_hard_(
    weight: Tensor, sigma: Tensor, radius: float | Tensor, *, active: Tensor | None = None
) -> Tensor:
    """Multiply `weight` `[batch, rows, cols]` by `radius / sigma` in place (SSO paper, eq. 13).

    `sigma` is `[batch]`. A unit with `sigma` zero or not finite stays as it is. `active` is a bool
    tensor, 0-d or `[batch]`; where it is False nothing changes.
    """
    return weight.mul_(hard_factor(sigma, radius, active=active).to(weight.dtype)[:, None, None])


def hard_factor(sigma: Tensor, radius: float | Tensor, *, active: Tensor | None = None) -> Tensor:
    """Compute the factor `[batch]` of `retract_hard_`; `radius` is a number or `[batch]`."""
    return _gate((radius / sigma).to(sigma.dtype), active)


def dynamic_factor(
    sigma: Tensor,
    radius: float | Tensor,
    *,
    rate: float,
    lr: float | Tensor,
    active: Tensor | None = None,
) -> Tensor:
    """Compute `1 + rate lr sign(radius - sigma)` `[batch]` (SSO paper, eq. 34).

    `radius` is a number or `[batch]`, `lr` a number, 0-d or `[batch]`. It is 1 at `sigma ==
    radius`, where `sigma` is not finite, and where `active`, as of `retract_hard_`, is False.
    """
    return _gate((1 + rate * lr * torch.sign(radius - sigma)).to(sigma.dtype), active)


@torch.no_grad()
def spectral_init_(
    weight: Tensor,
    *,
    mode: str = "spectral_mup",
    scaler: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fill `weight` `[..., rows, cols]` with Gaussian matrices of spectral norm `radius`.

    `W = R G / ||G||_2` with exact norms from a float64 SVD; the scale of the Gaussian cancels (SSO
    paper, section on initialisation). Each matrix of the stack is a unit by itself.
    """
    rows, cols = weight.shape[-2:]
    target = radius((rows, cols), mode, scaler)
    weight.normal_(generator=generator)
    sigma = torch.linalg.matrix_norm(weight.double(), ord=2, keepdim=True)
    return weight.mul_((target / sigma).to(weight.dtype))
