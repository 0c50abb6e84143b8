"""A slow, obvious SSO, MuonSphere and Muon: one matrix at a time, like published code.

What scripts/bench/optimizer.py compares our rules with. Per matrix and step: a hundred power
iterations from a constant vector; plain Newton-Schulz; the multiplier bracketed from 1e-3 by
doubling steps, then bisected; one more msign to form the direction. Nothing is cached between
steps. The only liberty is that the bracket may expand until it holds the root instead of giving up
at |lambda| = 1.02.
"""

import math

import torch
from torch import Tensor

from spectral.schedules import coefficients

STEPS = 8
POWER_ITERATIONS = 100
FIRST_STEP = 1e-3
MAX_EXPANSIONS = 20
MAX_BISECTIONS = 20


def msign(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The polar factor of one matrix by eight plain Newton-Schulz steps in `dtype`."""
    tall = x.shape[0] > x.shape[1]
    y = (x.T if tall else x) / x.norm().clamp_min(1e-7)
    y = y.to(dtype)
    for a, b, c in coefficients("polar_express", STEPS):
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.T if tall else y).to(x.dtype)


def power_iteration(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(sigma, u, v)` of one matrix from a constant start."""
    v = torch.ones(w.shape[1], device=w.device)
    for _ in range(POWER_ITERATIONS):
        u = w @ v
        u = u / u.norm()
        v = w.T @ u
        v = v / v.norm()
    return u @ w @ v, u, v


def tangent_direction(
    m: Tensor, u: Tensor, v: Tensor, tolerance: float, dtype: torch.dtype
) -> Tensor:
    """msign(m + lambda u v^T) with lambda found by bracketing and bisection."""
    theta = torch.outer(u, v)

    def f(multiplier: float) -> float:
        return float((theta * msign(m + multiplier * theta, dtype)).sum())

    low, f_low = 0.0, f(0.0)
    best, f_best = low, f_low
    if abs(f_low) > tolerance:
        step = FIRST_STEP if f_low < 0 else -FIRST_STEP
        high, f_high = low, f_low
        for _ in range(MAX_EXPANSIONS):
            low, f_low = high, f_high
            high = high + step
            f_high = f(high)
            step *= 2
            if (f_high > 0) != (f_low > 0):
                break
        best, f_best = min(((low, f_low), (high, f_high)), key=lambda pair: abs(pair[1]))
        for _ in range(MAX_BISECTIONS):
            if abs(f_best) <= tolerance:
                break
            middle = 0.5 * (low + high)
            f_middle = f(middle)
            if abs(f_middle) < abs(f_best):
                best, f_best = middle, f_middle
            if (f_middle > 0) == (f_low > 0):
                low = middle
            else:
                high = middle
    return msign(m + best * theta, dtype)


def step(
    rule: str,
    weight: Tensor,
    grad: Tensor,
    momentum: Tensor,
    *,
    lr: float,
    beta: float,
    weight_decay: float,
    tolerance: float,
    dtype: torch.dtype,
) -> None:
    """Take one step in place. `rule` is a key of `spectral.rules.RULES`."""
    scale = math.sqrt(weight.shape[0] / weight.shape[1])
    weight.mul_(1 - lr * weight_decay)
    momentum.lerp_(grad, 1 - beta)
    m = grad.lerp(momentum, beta)
    m = m / m.norm().clamp_min(1e-8)
    if rule == "muon":
        direction = msign(m, dtype)
    else:
        sigma, u, v = power_iteration(weight)
        weight.mul_(scale / (sigma.clamp_min(0) + 1e-8))
        if rule == "muon_sphere":
            direction = msign(m, dtype)
        else:
            direction = tangent_direction(m, u, v, tolerance, dtype)
    weight.sub_(lr * scale * direction)
