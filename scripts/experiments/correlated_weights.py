"""Correlated weights in the Muon++ paper: propositions 4.8 and 4.9, and the estimator of rho."""

import math

import torch
from torch import Tensor

from scripts.experiments.experiment import Check, Draws, Outcome, Panel, near
from spectral.measures import correlation
from spectral.singular_triplets import cold_start

SMALL = {"n": 300, "repeats": 500, "side": 32}
# (c = m / n, tau = n rho, Z) on both sides of the transition Z^2 tau sqrt(c) = 1.
TRANSITION = (
    (1.0, 1.0, 0.5), (1.0, 1.0, 1.5), (1.0, 1.0, 2.5),
    (1.0, 4.0, 0.3), (1.0, 4.0, 0.8), (1.0, 4.0, 1.0), (1.0, 4.0, 2.5),
    (0.25, 4.0, 0.5), (0.25, 4.0, 1.0), (0.25, 4.0, 2.5),
)  # fmt: skip
STRONG = (0.5, 1.0, 2.0)
"""Values of Z for rho = n^-1/2 and c = 1."""
FINITE = 0.025  # relative tolerance: at n = 1500 the norms are within 1% to 2% of the limits
KRYLOV = 200
# Estimates of rho from 64 x 64 matrices.
NONE_NEGATIVE = 0.683  # probability of a negative estimate if rho is 0: P(chi^2_1 < 1)
CORRELATIONS = (0.0, 1e-3, 0.05)
QUANTILES = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)


def experiment(draws: Draws, *, n: int = 1500, repeats: int = 4000, side: int = 64) -> Outcome:
    """Check both propositions on matrices with n columns, and the estimator on `repeats` random
    `side` x `side` matrices."""
    phi = {c: draws.normal(round(c * n), n) for c in (0.25, 1.0)}
    checks = []
    limits: dict[str, dict[float, float]] = {}
    measured: dict[str, dict[float, float]] = {}
    for c, tau, z in TRANSITION:
        w = correlated(phi[c], tau / n, z)
        ratio = norm(w) / (math.sqrt(w.shape[0]) + math.sqrt(n))
        label = f"m / n = {c:g}, n rho = {tau:g}"
        measured.setdefault(label, {})[z] = ratio
        limits[f"{label}, limit"] = {0.02 * i: limit(c, tau, 0.02 * i) for i in range(1, 140)}
        name = f"|W| / (sqrt m + sqrt n), c {c}, n rho {tau}, Z {z}"
        slack = max(FINITE, 4 * n ** (-2 / 3))
        checks.append(near(name, ratio, limit(c, tau, z), slack, "paper, eq. 4.11", "eq. 4.11"))
    large = strong(phi[1.0])
    checks.append(near("|W| / sqrt(m n rho) for Z 2, rho n^-1/2", large[2.0]["norm"], 2.0, 0.05,
                       "paper, eq. 4.9"))  # fmt: skip
    energy = float(correlated(phi[1.0], 1e-4, 1.0).square().mean().sqrt())
    checks.append(near("|W|_F / sqrt(m n), rho 1e-4", energy, 1, 0.01, "paper, prop. 4.8"))
    estimates, of_estimates = estimate(draws, repeats, side)
    panel = Panel(f"a spike leaves the bulk (n = {n})", limits, dots=measured, x="|Z|",
                  y="|W|_2 / (sqrt m + sqrt n)")  # fmt: skip
    data = {"norm": measured, "strong": large, "estimates": estimates}
    return Outcome([*checks, *of_estimates], data, [panel])


def limit(c: float, tau: float, z: float) -> float:
    """Return the limit of |W|_2 / (sigma (sqrt m + sqrt n)) for n rho -> tau (eq. 4.11)."""
    if z * z * tau * math.sqrt(c) <= 1:
        return 1.0
    spike = (z * z * tau + 1) * (z * z * tau * c + 1)
    return math.sqrt(spike) / (abs(z) * (1 + math.sqrt(c)) * math.sqrt(tau))


def correlated(phi: Tensor, rho: float, z: float | Tensor) -> Tensor:
    """Return sqrt(rho) Z J + sqrt(1 - rho) Phi `[batch, m, n]`, with sigma = 1."""
    return math.sqrt(rho) * z + math.sqrt(1 - rho) * phi


def norm(w: Tensor) -> float:
    """Return |W|_2 of a matrix by `cold_start`, a block Krylov iteration."""
    return float(cold_start(w[None], steps=KRYLOV)[0])


def strong(phi: Tensor) -> dict[float, dict[str, float]]:
    """Return two figures by Z, for rho far above 1 / n: |W|_2 / sqrt(m n rho), whose limit is |Z|,
    and the stable rank, whose limit is 1 / (Z^2 rho)."""
    rho = phi.shape[1] ** -0.5
    errors = {}
    for z in STRONG:
        w = correlated(phi, rho, z)
        top = norm(w)
        rank = float(w.square().sum()) / top**2
        errors[z] = {"norm": top / math.sqrt(w.numel() * rho), "stable_rank": rank}
    return errors


def estimate(draws: Draws, repeats: int, side: int) -> tuple[dict[float, list[float]], list[Check]]:
    """Check the estimator of eq. 4.13, which is unbiased but uses only one draw of Z per matrix."""
    estimates = {}
    for rho in CORRELATIONS:
        z = draws.normal(repeats, 1, 1)
        estimates[rho] = correlation(correlated(draws.normal(repeats, side, side), rho, z))
    none = estimates[0.0]
    deviation = math.sqrt(2) / side**2
    error = deviation / math.sqrt(repeats)
    checks = [
        Check("mean estimate of rho = 0", float(none.mean()), -4 * error, 4 * error, "theory"),
        # A squared Gaussian has kurtosis 15: the deviation is known to sqrt(14 / 4 / draws).
        near("its deviation", float(none.std()), deviation, 4 * math.sqrt(3.5 / repeats),
             "theory: sqrt 2 / (m n)"),
        near("share of negative estimates", float((none < 0).double().mean()), NONE_NEGATIVE,
             4 * 0.5 / math.sqrt(repeats), "theory: P(chi^2 < 1)"),
    ]  # fmt: skip
    return {
        rho: torch.quantile(values, QUANTILES).tolist() for rho, values in estimates.items()
    }, checks
