"""A slow, obvious SSO, MuonSphere and Muon, one matrix at a time, as published code does it.

The other side of `spectral.py`. Per matrix and step: a hundred power iterations from a constant
vector; plain Newton-Schulz; the multiplier bracketed from 1e-3 by doubling steps, then bisected;
one more msign to form the direction. Nothing is cached between steps. The only liberty is that the
bracket may expand until it holds the root instead of giving up at |lambda| = 1.02.
"""

import math

import torch
from torch import Tensor

POLAR_EXPRESS = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
)
POWER_ITERATIONS = 100
FIRST_STEP = 1e-3
MAX_EXPANSIONS = 20
MAX_BISECTIONS = 20


def msign(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The polar factor of one matrix by eight plain Newton-Schulz steps in `dtype`."""
    tall = x.shape[0] > x.shape[1]
    y = (x.T if tall else x) / x.norm().clamp_min(1e-7)
    y = y.to(dtype)
    for a, b, c in POLAR_EXPRESS:
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


def solve(
    m: Tensor, u: Tensor, v: Tensor, tolerance: float, dtype: torch.dtype
) -> tuple[Tensor, int, float]:
    """`(direction, msign evaluations, |f|)` by bracket, bisection and a final msign."""
    theta = torch.outer(u, v)
    count = 0

    def f(multiplier: float) -> float:
        nonlocal count
        count += 1
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
    return msign(m + best * theta, dtype), count + 1, abs(f_best)


def step(
    kind: str,
    weight: Tensor,
    grad: Tensor,
    momentum: Tensor,
    *,
    lr: float,
    beta: float,
    weight_decay: float,
    tolerance: float,
    dtype: torch.dtype,
) -> tuple[int, float]:
    """`(msign evaluations, |f|)`; one step in place. `kind` as in `spectral.rules.RULES`."""
    scale = math.sqrt(weight.shape[0] / weight.shape[1])
    weight.mul_(1 - lr * weight_decay)
    momentum.lerp_(grad, 1 - beta)
    m = grad.lerp(momentum, beta)
    m = m / m.norm().clamp_min(1e-8)
    evaluations, miss = 1, 0.0
    if kind == "muon":
        direction = msign(m, dtype)
    else:
        sigma, u, v = power_iteration(weight)
        weight.mul_(scale / (sigma.clamp_min(0) + 1e-8))
        if kind == "muon_sphere":
            direction = msign(m, dtype)
        else:
            direction, evaluations, miss = solve(m, u, v, tolerance, dtype)
    weight.sub_(lr * scale * direction)
    return evaluations, miss
