"""The multiplier lambda in the SSO paper."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from scripts.experiments.experiment import Check, Draws, Outcome, Panel, at_least, at_most, near
from spectral import msign, solve_multiplier
from spectral.measures import singular_values
from spectral.singular_triplets import cold_start

TOLERANCE = 2e-4
MOST_EVALUATIONS = 8
GRID = (-0.1, -0.05, -0.03, -0.02, -0.01, -0.003, 0.0, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1)
KRYLOV = 100
EXACT_SHAPES = ((16, 16), (32, 16), (16, 32), (64, 128), (128, 64))
"""Shapes of the matrices whose multipliers are recorded to nine digits in recorded.yaml."""
BISECTED = (24, 16)
# Number of float64 msign steps after which even square matrices have converged to all recorded
# digits.
EXACT_STEPS = 26


def solver_curve(
    draws: Draws,
    *,
    shapes: tuple[tuple[int, int], ...] = ((1024, 3072), (4096, 1024)),
    repeats: int = 5,
) -> Outcome:
    """Figure 3 of the SSO paper: f(lambda) = <Theta, msign(M + lambda Theta)> is monotone. For
    independent Gaussian matrices, the root of f is close to 0. The solver finds this root.

    For each shape, the experiment evaluates f on a grid for one draw, and finds the root of f for
    each of several draws. It also computes the multipliers of small matrices to nine digits.
    """
    checks, panels, data = [], [], []
    for rows, cols in shapes:
        name = f"{rows} x {cols}"
        problems = [problem(*gaussian(draws.restarted(i), rows, cols))[:3] for i in range(repeats)]
        (m, u, v), *_ = problems
        theta = u[:, :, None] * v[:, None]
        f = {x: tangency(msign(m + x * theta), u, v) for x in GRID}
        solved = [
            solve_multiplier(*problem, tolerance=TOLERANCE, max_evaluations=MOST_EVALUATIONS,
                             early_exit=True)
            for problem in problems
        ]  # fmt: skip
        residuals = [
            tangency(s.direction, u, v) for s, (_, u, v) in zip(solved, problems, strict=True)
        ]
        roots = [float(s.multiplier) for s in solved]
        evaluations = [float(s.evaluations) for s in solved]
        interval = 2 * float(singular_values(m).sum())
        data.append({"shape": (rows, cols), "f": f, "roots": roots, "residuals": residuals,
                     "evaluations": evaluations, "interval": interval})  # fmt: skip
        checks += properties((rows, cols), f, roots, interval)
        checks += [
            at_most(f"{name}: largest |f|", max(map(abs, residuals)), TOLERANCE,
                    "paper: tolerance"),
            at_most(f"{name}: mean msign evaluations", sum(evaluations) / repeats, 2.2,
                    "this project's goal"),
        ]  # fmt: skip
        panels.append(Panel(f"{name}: mean root {sum(roots) / repeats:.1e}", {"f": f},
                            dots={"roots": dict.fromkeys(roots, 0.0)}, x="lambda", y="f(lambda)",
                            levels={"0": 0.0}))  # fmt: skip
    checks += [by_bisection(draws.restarted(i), draws.seed + i) for i in range(repeats)]
    exact = {f"{m} x {n}": exactly(draws.restarted(), m, n) for m, n in EXACT_SHAPES}
    return Outcome(checks, {"shapes": data, "exact": exact}, panels)


def gaussian(draws: Draws, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Return independent Gaussian M and W `[1, rows, cols]` in float32."""
    m, w = (
        each.normal(1, rows, cols, dtype=torch.float32) for each in (draws, draws.restarted(1000))
    )
    return m, w


def problem(m: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return M scaled to unit Frobenius norm, and the top singular vectors and value of W."""
    top, u, v = cold_start(w, steps=KRYLOV)
    return m / torch.linalg.matrix_norm(m), u, v, top


def tangency(direction: Tensor, u: Tensor, v: Tensor) -> float:
    """Return <u v^T, direction> for a single matrix."""
    return float(u[0] @ direction[0] @ v[0])


def properties(
    shape: tuple[int, int], f: Mapping[float, float], roots: Sequence[float], interval: float
) -> list[Check]:
    """Check that f increases, and that its roots are near 0 and in the interval of theorem A.3."""
    name = f"{shape[0]} x {shape[1]}"
    rise = min(after - before for before, after in pairwise(f.values()))
    # The standard deviation of lambda* for independent Gaussian matrices, to first order. Let
    # m <= n. Then f(0) = u^T Q v has variance 1 / n, where Q is random with orthonormal rows. The
    # singular values of M are close to s = 1 / sqrt(m), so the slope of f at 0 is at least
    # (1 - m / (2 n)) / s.
    short, long = sorted(shape)
    deviation = 1 / (math.sqrt(long * short) * (1 - short / (2 * long)))
    mean = 3 * deviation / math.sqrt(len(roots))
    return [
        at_least(f"{name}: least rise of f over the grid", rise, 0, "paper, theorem A.2"),
        at_most(f"{name}: largest |lambda*|", max(map(abs, roots)), interval, "paper, theorem A.3"),
        Check(f"{name}: mean lambda* of {len(roots)}", sum(roots) / len(roots), -mean, mean,
              "theory: 3 standard errors of 0"),
    ]  # fmt: skip


def by_bisection(draws: Draws, seed: int) -> Check:
    """Return a check that compares a small matrix's multiplier with the root of f. The root is
    found by bisection with exact SVDs."""
    m, w = (each.double()[0] for each in gaussian(draws, *BISECTED))
    m = m / m.norm()
    left, _, right = torch.linalg.svd(w)
    u, v = left[:, 0], right[0]
    low, high = -1.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        a, _, b = torch.linalg.svd(m + middle * torch.outer(u, v), full_matrices=False)
        low, high = (middle, high) if float(u @ a @ b @ v) < 0 else (low, middle)
    solution = exact_solution(m[None], u[None], v[None])
    name = f"{m.shape[0]} x {m.shape[1]}, seed {seed}: lambda*"
    return near(name, solution, low, 1e-5, "theory: bisection, SVD", "bisection")


def exact_solution(m: Tensor, u: Tensor, v: Tensor) -> float:
    """Return lambda* in float64."""
    solution = solve_multiplier(
        m, u, v, tolerance=1e-9, max_evaluations=30, steps=EXACT_STEPS, early_exit=True
    )
    return float(solution.multiplier)


def exactly(draws: Draws, rows: int, cols: int) -> dict[str, float]:
    """Return sigma_1(W), f(0) and lambda* of a small matrix in float64."""
    m, u, v, top = problem(*(each.double() for each in gaussian(draws, rows, cols)))
    begin = tangency(msign(m, steps=EXACT_STEPS), u, v)
    return {"sigma_1": float(top), "f(0)": begin, "multiplier": exact_solution(m, u, v)}
