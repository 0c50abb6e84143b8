"""Muon++: a step shorter than the spectral gap preserves the norm, a longer step may change it, and
over many steps only the rescaling algorithm preserves the norm."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from scripts.experiments.experiment import Check, Draws, Outcome, Panel, at_least, at_most, near
from spectral.measures import singular_values, spectral_norm
from spectral.rules import MuonPlusPlusRule, take_step

SMALL = {"shapes": ((8, 8), (48, 48)), "repeats": 8, "side": 24, "steps": 60}
MOMENTUM = 0.95
# Error of the rule's msign in float64 if no singular value is tiny.
EXACT = 1e-6
LONG_RUNS = (
    ("algorithm 1, random gradients, eta 0.01", "project", "random", 0.01),
    ("algorithm 1, random gradients, eta 0.002", "project", "random", 0.002),
    ("algorithm 1, towards a target, eta 0.01", "project", "target", 0.01),
    ("algorithm 2, random gradients, eta 0.01", "project_rescale", "random", 0.01),
    ("algorithm 2, towards a target, eta 0.01", "project_rescale", "target", 0.01),
)


def experiment(
    draws: Draws,
    *,
    shapes: tuple[tuple[int, int], ...] = ((64, 64), (128, 512), (512, 512)),
    repeats: int = 40,
    side: int = 128,
    steps: int = 300,
) -> Outcome:
    """Measure the spectral gaps of `repeats` initial matrices of each shape, the norm after single
    steps shorter and longer than the gap, and the norm over many steps of a `side` x `side`
    matrix."""
    initial = [on_sphere(draws.normal(repeats, *shape)) for shape in shapes]
    gaps = [relative_gap(w) for w in initial]
    within, beyond = [], []
    for w, gap in zip(initial, gaps, strict=True):
        few, small = w[:10], gap[:10]
        gradient = draws.normal(*few.shape)
        within.append(float(norm_after(few, gradient, 0.99 * small).sub(1).abs().max()))
        worst = norm_after(few, runner_up(few), 1.1 * small)
        beyond.append(float((worst > 1 + EXACT).double().mean()))
    runs = {
        name: long_run(draws.restarted(), side, steps, algorithm, gradients, eta)
        for name, algorithm, gradients, eta in LONG_RUNS
    }
    by_shape = {f"{m} x {n}": gap for (m, n), gap in zip(shapes, gaps, strict=True)}
    means = {name: float(gap.mean()) for name, gap in by_shape.items()}
    checks = [*single_steps(within, beyond), *counterexample(), *properties(means, runs)]
    data = {
        "gaps": {name: gap.tolist() for name, gap in by_shape.items()},
        "mean_gap": means,
        "norms": runs,
        # First step after which the norm exceeds S, or 0 if it never does.
        "first_above": {
            name: next((step for step, norm in enumerate(norms, 1) if norm > 1 + EXACT), 0)
            for name, norms in runs.items()
        },
    }
    return Outcome(checks, data, panels(by_shape, means, runs))


def on_sphere(w: Tensor) -> Tensor:
    """Scale `w` `[batch, rows, cols]` to the norm S = sqrt(rows / cols)."""
    return w * math.sqrt(w.shape[-2] / w.shape[-1]) / spectral_norm(w)[:, None, None]


def relative_gap(w: Tensor) -> Tensor:
    """Return (sigma_1 - sigma_2) / sigma_1 `[batch]`."""
    values = singular_values(w)
    return 1 - values[:, 1] / values[:, 0]


def norm_after(w: Tensor, gradient: Tensor, eta: Tensor) -> Tensor:
    """Return |W|_2 / S `[batch]` after one step of algorithm 1 with step size `eta` `[batch]`."""
    rule = MuonPlusPlusRule(algorithm="project", momentum=0.0, steps=14)
    norms = []
    for one, grad, lr in zip(w, gradient, eta, strict=True):
        weight = one[None].clone()
        # Exact vectors, because a cold Krylov iteration converges slowly for a gap of 1%.
        state = rule.init_state(weight)
        left, _, right = torch.linalg.svd(weight, full_matrices=False)
        state["u"].copy_(left[:, :, 0])
        state["v"].copy_(right[:, 0])
        take_step(rule, weight, grad[None].clone(), state, lr=float(lr))
        norms.append(spectral_norm(weight)[0])
    return torch.stack(norms) / math.sqrt(w.shape[-2] / w.shape[-1])


def runner_up(w: Tensor) -> Tensor:
    """Return -u_2 v_2^T, the gradient whose step increases the second singular value."""
    left, _, right = torch.linalg.svd(w, full_matrices=False)
    direction: Tensor = -left[:, :, 1, None] * right[:, 1, None, :]
    return direction


def long_run(
    draws: Draws, side: int, steps: int, algorithm: str, gradients: str, eta: float
) -> list[float]:
    """Return |W|_2 / S after each step, with random gradients or, for "target", gradients W - T
    with a target T of norm 2 S."""
    w = on_sphere(draws.normal(1, side, side))
    target = 2 * on_sphere(draws.normal(1, side, side)) if gradients == "target" else None
    rule = MuonPlusPlusRule(algorithm=algorithm, momentum=MOMENTUM)  # type: ignore[arg-type]
    state, norms = rule.init_state(w), []
    for _ in range(steps):
        grad = draws.normal(*w.shape) if target is None else w - target
        take_step(rule, w, grad, state, lr=eta)
        norms.append(float(spectral_norm(w)))
    return norms


def single_steps(within: list[float], beyond: list[float]) -> list[Check]:
    """Check proposition A.1, and that its bound is tight."""
    return [
        at_most(
            "largest change of norm, step of 0.99 gaps", max(within), EXACT, "paper, prop. A.1"
        ),
        at_least("share of violations, worst step of 1.1 gaps", min(beyond), 1, "theory: sharp"),
    ]


def counterexample() -> list[Check]:
    """Check W = diag(1, 0.2), D = diag(0, -1), whose norm is constant up to eta = 0.8."""
    w = torch.diag(torch.tensor([1.0, 0.2], dtype=torch.float64)).expand(2, 2, 2)
    gradient = torch.diag(torch.tensor([0.0, -1.0], dtype=torch.float64)).expand(2, 2, 2)
    norms = norm_after(w, gradient, torch.tensor([0.8, 0.85]))
    return [
        near("norm of diag(1, 0.2) after eta 0.80", float(norms[0]), 1.0, EXACT, "theory"),
        near("norm of diag(1, 0.2) after eta 0.85", float(norms[1]), 1.05, EXACT, "theory"),
    ]


def properties(means: Mapping[str, float], runs: Mapping[str, list[float]]) -> list[Check]:
    """Check statements that are true for every draw."""
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
    """Return panels of the norm over steps and of the gaps of Gaussian matrices."""
    rescaled = {name: run for name, run in runs.items() if name.startswith("algorithm 2")}
    plain = {name: run for name, run in runs.items() if name not in rescaled}
    dots = {f"{name}, mean {means[name]:.4f}": gap.tolist() for name, gap in gaps.items()}
    title, gap = "gap of Gaussian matrices", "(sigma_1 - sigma_2) / sigma_1"
    return [
        Panel("the norm over time", plain, rescaled, y="|W|_2 / S"),
        Panel(title, dots=dots, x="draw", y=gap, log="y"),
    ]
