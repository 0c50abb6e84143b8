"""The spectral norm of weights in the Muon++ paper: over steps of Muon++, and for correlated
weights."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from scripts.experiments.experiment import Check, Draws, Outcome, Panel, at_least, at_most, near
from spectral.measures import correlation, singular_values, spectral_norm
from spectral.rules import MuonPlusPlusRule, take_step
from spectral.singular_triplets import cold_start

MOMENTUM = 0.95
# Error of the rule's float64 msign if no singular value is tiny.
EXACT = 1e-6
LONG_RUNS = (
    ("algorithm 1, random gradients, eta 0.01", "project", "random", 0.01),
    ("algorithm 1, random gradients, eta 0.002", "project", "random", 0.002),
    ("algorithm 1, towards a target, eta 0.01", "project", "target", 0.01),
    ("algorithm 2, random gradients, eta 0.01", "project_rescale", "random", 0.01),
    ("algorithm 2, towards a target, eta 0.01", "project_rescale", "target", 0.01),
)
# Settings (c = m / n, tau = n rho, Z) on both sides of the transition Z^2 tau sqrt(c) = 1.
TRANSITION = (
    (1.0, 1.0, 0.5), (1.0, 1.0, 1.5), (1.0, 1.0, 2.5),
    (1.0, 4.0, 0.3), (1.0, 4.0, 0.8), (1.0, 4.0, 1.0), (1.0, 4.0, 2.5),
    (0.25, 4.0, 0.5), (0.25, 4.0, 1.0), (0.25, 4.0, 2.5),
)  # fmt: skip
STRONG = (0.5, 1.0, 2.0)
"""Values of Z for rho = n^-1/2 and c = 1."""
FINITE = 0.025  # relative tolerance: at n = 1500, norms are within 1% to 2% of their limits
KRYLOV = 200
# Estimates of rho from 64 x 64 matrices.
NONE_NEGATIVE = 0.683  # probability that the estimate for rho = 0 is negative: P(chi^2_1 < 1)
CORRELATIONS = (0.0, 1e-3, 0.05)
QUANTILES = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)


def muon_gap(
    draws: Draws,
    *,
    shapes: tuple[tuple[int, int], ...] = ((64, 64), (128, 512), (512, 512)),
    repeats: int = 40,
    side: int = 128,
    steps: int = 300,
) -> Outcome:
    """Muon++: a step shorter than the spectral gap preserves the norm, while a longer step may
    change it. Over many steps, only the rescaling algorithm preserves the norm.

    The experiment measures the spectral gaps of `repeats` initial matrices of each shape. It also
    measures the norm after single steps shorter and longer than the gap, and the norm of a `side` x
    `side` matrix over many steps.
    """
    initial = [on_sphere(draws.normal(repeats, *shape)) for shape in shapes]
    gaps, within, beyond = [], [], []
    for w in initial:
        values = singular_values(w)
        gaps.append(1 - values[:, 1] / values[:, 0])  # (sigma_1 - sigma_2) / sigma_1
        few, small = w[:10], gaps[-1][:10]
        gradient = draws.normal(*few.shape)
        within.append(float(norm_after(few, gradient, 0.99 * small).sub(1).abs().max()))
        # A step along -u_2 v_2^T increases the second singular value.
        left, _, right = torch.linalg.svd(few, full_matrices=False)
        runner_up = -left[:, :, 1, None] * right[:, 1, None, :]
        worst = norm_after(few, runner_up, 1.1 * small)
        beyond.append(float((worst > 1 + EXACT).double().mean()))
    runs = {
        name: long_run(draws.restarted(), side, steps, algorithm, gradients, eta)
        for name, algorithm, gradients, eta in LONG_RUNS
    }
    by_shape = {f"{m} x {n}": gap for (m, n), gap in zip(shapes, gaps, strict=True)}
    means = {name: float(gap.mean()) for name, gap in by_shape.items()}
    checks = [
        at_most(
            "largest change of norm, step of 0.99 gaps", max(within), EXACT, "paper, prop. A.1"
        ),
        at_least("share of violations, worst step of 1.1 gaps", min(beyond), 1, "theory: sharp"),
        *counterexample(),
        *every_draw(means, runs),
    ]
    data = {
        "gaps": {name: gap.tolist() for name, gap in by_shape.items()},
        "mean_gap": means,
        "norms": runs,
        # First step after which the norm exceeds S, or 0 if there is none.
        "first_above": {
            name: next((step for step, norm in enumerate(norms, 1) if norm > 1 + EXACT), 0)
            for name, norms in runs.items()
        },
    }
    return Outcome(checks, data, panels(by_shape, means, runs))


def on_sphere(w: Tensor) -> Tensor:
    """Scale `w` `[batch, rows, cols]` to the norm S = sqrt(rows / cols)."""
    return w * math.sqrt(w.shape[-2] / w.shape[-1]) / spectral_norm(w)[:, None, None]


def norm_after(w: Tensor, gradient: Tensor, eta: Tensor) -> Tensor:
    """Return |W|_2 / S `[batch]` after one step of algorithm 1 with step size `eta` `[batch]`."""
    rule = MuonPlusPlusRule(algorithm="project", momentum=0.0, steps=14)
    norms = []
    for one, grad, lr in zip(w, gradient, eta, strict=True):
        weight = one[None].clone()
        # Use exact vectors: a cold-started Krylov iteration converges slowly at a gap of 1%.
        state = rule.init_state(weight)
        left, _, right = torch.linalg.svd(weight, full_matrices=False)
        state["u"].copy_(left[:, :, 0])
        state["v"].copy_(right[:, 0])
        take_step(rule, weight, grad[None].clone(), state, lr=float(lr))
        norms.append(spectral_norm(weight)[0])
    return torch.stack(norms) / math.sqrt(w.shape[-2] / w.shape[-1])


def long_run(
    draws: Draws, side: int, steps: int, algorithm: str, gradients: str, eta: float
) -> list[float]:
    """Return |W|_2 / S after each step. The gradients are random or, for "target", W - T with a
    target T of norm 2 S."""
    w = on_sphere(draws.normal(1, side, side))
    target = 2 * on_sphere(draws.normal(1, side, side)) if gradients == "target" else None
    rule = MuonPlusPlusRule(algorithm=algorithm, momentum=MOMENTUM)  # type: ignore[arg-type]
    state, norms = rule.init_state(w), []
    for _ in range(steps):
        grad = draws.normal(*w.shape) if target is None else w - target
        take_step(rule, w, grad, state, lr=eta)
        norms.append(float(spectral_norm(w)))
    return norms


def counterexample() -> list[Check]:
    """Check that a step with D = diag(0, -1) preserves the norm of W = diag(1, 0.2) up to eta =
    0.8, but not at eta = 0.85."""
    w = torch.diag(torch.tensor([1.0, 0.2], dtype=torch.float64)).expand(2, 2, 2)
    gradient = torch.diag(torch.tensor([0.0, -1.0], dtype=torch.float64)).expand(2, 2, 2)
    norms = norm_after(w, gradient, torch.tensor([0.8, 0.85]))
    return [
        near("norm of diag(1, 0.2) after eta 0.80", float(norms[0]), 1.0, EXACT, "theory"),
        near("norm of diag(1, 0.2) after eta 0.85", float(norms[1]), 1.05, EXACT, "theory"),
    ]


def every_draw(means: Mapping[str, float], runs: Mapping[str, list[float]]) -> list[Check]:
    """Check statements that hold for every draw."""
    one, _, target, two, two_target = runs.values()
    first, *_, last = means.values()
    return [
        at_most("mean gap, largest / smallest matrix", last / first, 1, "paper, fact A.2"),
        at_least("algorithm 1, random: last norm", one[-1], 1.001, "theory: it grows"),
        at_least("algorithm 1, target: last norm", target[-1], 1.001, "theory: it grows"),
        at_most("algorithm 2: largest |norm - 1|",
                max(abs(norm - 1) for norm in (*two, *two_target)), 0.01, "paper"),
    ]  # fmt: skip


def panels(
    gaps: Mapping[str, Tensor], means: Mapping[str, float], runs: Mapping[str, list[float]]
) -> list[Panel]:
    """Return two panels: the norm against the step, and the gaps of Gaussian matrices."""
    rescaled = {name: run for name, run in runs.items() if name.startswith("algorithm 2")}
    plain = {name: run for name, run in runs.items() if name not in rescaled}
    dots = {f"{name}, mean {means[name]:.4f}": gap.tolist() for name, gap in gaps.items()}
    title, gap = "gap of Gaussian matrices", "(sigma_1 - sigma_2) / sigma_1"
    return [
        Panel("the norm over time", plain, rescaled, y="|W|_2 / S"),
        Panel(title, dots=dots, x="draw", y=gap, log="y"),
    ]


def correlated_weights(
    draws: Draws, *, n: int = 1500, repeats: int = 4000, side: int = 64
) -> Outcome:
    """Correlated weights in the Muon++ paper: propositions 4.8 and 4.9, and the estimator of rho.

    The propositions are checked on matrices with n columns, and the estimator on `repeats` random
    `side` x `side` matrices.
    """
    phi = {c: draws.normal(round(c * n), n) for c in (0.25, 1.0)}
    checks = []
    limits: dict[str, dict[float, float]] = {}
    measured: dict[str, dict[float, float]] = {}
    for c, tau, z in TRANSITION:
        w = correlated(phi[c], tau / n, z)
        ratio = krylov_norm(w) / (math.sqrt(w.shape[0]) + math.sqrt(n))
        label = f"m / n = {c:g}, n rho = {tau:g}"
        measured.setdefault(label, {})[z] = ratio
        limits[f"{label}, limit"] = {0.02 * i: limit(c, tau, 0.02 * i) for i in range(1, 140)}
        name = f"|W| / (sqrt m + sqrt n), c {c}, n rho {tau}, Z {z}"
        slack = max(FINITE, 4 * n ** (-2 / 3))
        checks.append(near(name, ratio, limit(c, tau, z), slack, "paper, eq. 4.11", "eq. 4.11"))
    # At a rho far above 1 / n, the limit of |W|_2 / sqrt(m n rho) is |Z|, and that of the stable
    # rank is 1 / (Z^2 rho).
    rho, large = n**-0.5, {}
    for z in STRONG:
        w = correlated(phi[1.0], rho, z)
        top = krylov_norm(w)
        rank = float(w.square().sum()) / top**2
        large[z] = {"norm": top / math.sqrt(w.numel() * rho), "stable_rank": rank}
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


def krylov_norm(w: Tensor) -> float:
    """Return |W|_2 of a matrix, computed by `cold_start`, a block Krylov iteration."""
    return float(cold_start(w[None], steps=KRYLOV)[0])


def estimate(draws: Draws, repeats: int, side: int) -> tuple[dict[float, list[float]], list[Check]]:
    """Check the estimator in eq. 4.13, which is unbiased but uses a single draw of Z per matrix."""
    estimates = {}
    for rho in CORRELATIONS:
        z = draws.normal(repeats, 1, 1)
        estimates[rho] = correlation(correlated(draws.normal(repeats, side, side), rho, z))
    none = estimates[0.0]
    deviation = math.sqrt(2) / side**2
    error = deviation / math.sqrt(repeats)
    checks = [
        Check("mean estimate of rho = 0", float(none.mean()), -4 * error, 4 * error, "theory"),
        # A squared Gaussian has kurtosis 15, so the relative error of the standard deviation is
        # sqrt(14 / 4 / draws).
        near("its deviation", float(none.std()), deviation, 4 * math.sqrt(3.5 / repeats),
             "theory: sqrt 2 / (m n)"),
        near("share of negative estimates", float((none < 0).double().mean()), NONE_NEGATIVE,
             4 * 0.5 / math.sqrt(repeats), "theory: P(chi^2 < 1)"),
    ]  # fmt: skip
    return {
        rho: torch.quantile(values, QUANTILES).tolist() for rho, values in estimates.items()
    }, checks
