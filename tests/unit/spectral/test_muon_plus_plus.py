"""Muon++: the direction, the gap condition and its counterexample, and a long run."""

import math

import pytest
import torch
from torch import Tensor

from spectral.polar import msign
from spectral.rules import MuonPlusPlusRule
from spectral.rules.base import take_step
from spectral.rules.muon_plus_plus import project_

ALGORITHMS = ["project", "project_rescale", "dual"]


def weight_with_gap(rows: int, cols: int, gap: float, batch: int = 1, seed: int = 0) -> Tensor:
    """Return float64 matrices with norm sqrt(rows / cols) whose second singular value is (1 - gap)
    times the first."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(batch, rows, cols, generator=generator, dtype=torch.float64)
    left, sigma, right = torch.linalg.svd(w, full_matrices=False)
    sigma = sigma / sigma[:, 1:2] * (1 - gap)
    sigma[:, 0] = 1
    return math.sqrt(rows / cols) * (left * sigma[:, None, :]) @ right


def norms(w: Tensor) -> Tensor:
    """Return ||W||_2 divided by the radius of spectral muP, from a float64 SVD."""
    values: Tensor = torch.linalg.matrix_norm(w.double(), 2)
    return values / math.sqrt(w.shape[-2] / w.shape[-1])


def top_pair(w: Tensor) -> tuple[Tensor, Tensor]:
    left, _, right = torch.linalg.svd(w.double(), full_matrices=False)
    return left[:, :, 0], right[:, 0]


@pytest.mark.parametrize("algorithm", ["project", "project_rescale"])
@pytest.mark.parametrize("shape", [(16, 16), (32, 8), (8, 32)])
def test_norm_is_kept_within_the_gap(shape: tuple[int, int], algorithm: str) -> None:
    w = weight_with_gap(*shape, gap=0.1, batch=4)
    rule = MuonPlusPlusRule(algorithm=algorithm, momentum=0.0)  # type: ignore[arg-type]
    report = take_step(rule, w, torch.randn(w.shape).double(), rule.init_state(w), lr=0.0999)
    torch.testing.assert_close(norms(w), torch.ones(4).double(), rtol=0, atol=1e-9)
    # The runner-up is found by a Krylov iteration, to better than 1e-6 with a gap behind it.
    torch.testing.assert_close(report["gap"], torch.full((4,), 0.1).double(), rtol=0, atol=1e-4)
    assert not report["gap_exceeded"].any()


@pytest.mark.parametrize(("eta", "norm", "exceeded"), [(0.79, 1.0, 0), (0.85, 1.05, 1)])
def test_counterexample_beyond_the_gap(eta: float, norm: float, exceeded: int) -> None:
    # W = diag(1, 0.2), D = diag(0, -1): certified exactly up to eta = 0.8.
    w = torch.diag(torch.tensor([1.0, 0.2], dtype=torch.float64))[None]
    grad = torch.diag(torch.tensor([0.0, -3.0], dtype=torch.float64))[None]
    rule = MuonPlusPlusRule(algorithm="project", momentum=0.0, steps=14)
    report = take_step(rule, w.clone(), grad.clone(), rule.init_state(w), lr=eta)
    assert report["gap_exceeded"].item() == exceeded
    assert report["gap"].item() == pytest.approx(0.8)
    for algorithm, expected in (("project", norm), ("project_rescale", 1.0)):
        moved = w.clone()
        rule = MuonPlusPlusRule(algorithm=algorithm, momentum=0.0, steps=14)  # type: ignore[arg-type]
        take_step(rule, moved, grad.clone(), rule.init_state(moved), lr=eta)
        assert float(norms(moved)) == pytest.approx(expected, abs=1e-9)


def test_rescale_follows_a_runner_up_that_overtakes() -> None:
    # The old pair remains an exact singular pair: an iteration from it alone would report the old
    # norm.
    w = torch.diag(torch.tensor([1.0, 0.9, 0.1], dtype=torch.float64))[None]
    grad = torch.diag(torch.tensor([0.0, -1.0, 0.0], dtype=torch.float64))[None]
    rule = MuonPlusPlusRule(momentum=0.0, steps=14)
    state = rule.init_state(w)
    report = take_step(rule, w, grad, state, lr=0.5)
    assert report["norm"].item() == pytest.approx(1.4)
    assert float(norms(w)) == pytest.approx(1.0, abs=1e-9)
    assert abs(float(state["u"][0, 1])) == pytest.approx(1.0)
    assert abs(float(state["second_u"][0, 0])) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("algorithm", "low", "high"), [("project", 1.5, 9), ("project_rescale", 0, 0.01)]
)
def test_three_hundred_steps_toward_a_target(algorithm: str, low: float, high: float) -> None:
    # A Gaussian weight has a gap of about 1%. Algorithm 1 leaves the sphere and does not return,
    # algorithm 2 stays on it to 1%, the accuracy of a ten-step Krylov iteration on a crowded
    # spectrum.
    w = torch.randn(1, 64, 64)
    w /= torch.linalg.matrix_norm(w, 2)
    target = torch.randn(1, 64, 64)
    rule = MuonPlusPlusRule(algorithm=algorithm, momentum=0.9)  # type: ignore[arg-type]
    state = rule.init_state(w)
    worst = exceeded = 0.0
    for _ in range(300):
        report = take_step(rule, w, w - target, state, lr=0.01)
        worst = max(worst, abs(float(norms(w)) - 1))
        exceeded += report["gap_exceeded"].item()
    assert low <= worst <= high
    assert exceeded > 200  # the report warns of it


def test_dual_direction_minimises_the_nuclear_norm() -> None:
    torch.manual_seed(3)
    w, grad = weight_with_gap(24, 32, gap=0.1), torch.randn(1, 24, 32, dtype=torch.float64)
    before, (u, v) = w.clone(), top_pair(w)
    rule = MuonPlusPlusRule(
        algorithm="dual", momentum=0.0, tolerance=1e-10, max_evaluations=12, steps=14
    )
    report = take_step(rule, w, grad.clone(), rule.init_state(w), lr=0.01)
    d = ((before - w) / (0.01 * math.sqrt(24 / 32)))[0]
    nu = report["multiplier"].item() * float(grad.norm())
    theta = torch.outer(u[0], v[0])

    def dual(x: float) -> float:
        return float(torch.linalg.svdvals(grad[0] + x * theta).sum())

    assert report["converged"].item() == 1
    assert float(u[0] @ d @ v[0]) == pytest.approx(0, abs=1e-9)
    # Primal and dual optimum agree, nu is a minimum of the convex dual, and the value lies between
    # the projected direction's and the unconstrained one's.
    primal = float((grad[0] * d).sum())
    assert primal == pytest.approx(dual(nu), rel=1e-9)
    assert dual(nu) <= min(dual(nu + 0.01), dual(nu - 0.01))
    projected = grad[0] - torch.outer(u[0], u[0] @ grad[0])
    projected = projected - torch.outer(projected @ v[0], v[0])
    assert float(torch.linalg.svdvals(projected).sum()) < primal < dual(0)
    # A first-order relaxation: u^T D and D v are not small, and the norm moves within the gap.
    assert float((u[0] @ d).norm()) > 0.5 and float((d @ v[0]).norm()) > 0.5
    assert float(norms(w)) > 1 + 1e-5


def test_projection_survives_bfloat16_products() -> None:
    # The rounding of msign in the null directions must not leak into the step.
    w = weight_with_gap(32, 32, gap=0.2).float()
    u, v = (x.float() for x in top_pair(w))
    before = w.clone()
    grad = torch.randn(1, 32, 32)
    rule = MuonPlusPlusRule(algorithm="project", msign_dtype="bfloat16", momentum=0.0)
    take_step(rule, w, grad.clone(), rule.init_state(w), lr=0.1)
    step = (before - w) / 0.1

    def leak(direction: Tensor) -> float:
        return float((u[:, None, :] @ direction).norm() + (direction @ v[:, :, None]).norm())

    # float32 rounding of two projections, against msign alone on the null directions.
    assert leak(step) < 1e-5
    assert leak(msign(project_(grad, u, v), dtype=torch.bfloat16)) > 1e-3


def correlated(rho: float, size: int = 32) -> Tensor:
    """Return a matrix whose estimated correlation is exactly `rho`."""
    noise = torch.randn(1, size, size, dtype=torch.float64)
    noise = (noise - noise.mean()) / noise.std(correction=0)
    count = size * size
    share = (1 + rho * (count - 1)) / count  # mean^2 / mean of squares
    return 0.1 * (math.sqrt(share) + math.sqrt(1 - share) * noise)


@pytest.mark.parametrize(
    ("asked", "first", "acts"),
    # A negative estimate (two of three draws of independent entries) gives no ratio.
    [(False, 0.2, False), (True, 0.2, True), (True, -0.5 / 1024, False)],
)
def test_correlation_rescale_acts_once_and_only_when_asked(asked, first, acts) -> None:
    rule = MuonPlusPlusRule(algorithm="project", correlation_rescale=asked, momentum=0.0)
    w = correlated(first)
    state = rule.init_state(w)
    assert state["correlation"].item() == pytest.approx(first)
    # Threshold 2 / sqrt(32) = 0.354; the weight is replaced by one with rho = 0.5, then 0.9.
    for rho in (0.5, 0.9) if acts else (0.5,):
        w.copy_(correlated(rho))
        before = w.clone()
        take_step(rule, w, torch.zeros_like(w), state, lr=0.1, active=torch.tensor(False))
        assert torch.equal(w, before)
        report = take_step(rule, w, torch.zeros_like(w), state, lr=0.1)
        assert report["correlation"].item() == pytest.approx(rho)
        factor = math.sqrt(first / rho) if acts and rho == 0.5 else 1.0
        torch.testing.assert_close(w, factor * before)
        assert state["rescaled"].item() == float(acts)


def test_zero_weight_moves_and_stays_finite() -> None:
    for algorithm in ALGORITHMS:
        w = torch.zeros(2, 5, 4)
        rule = MuonPlusPlusRule(algorithm=algorithm)  # type: ignore[arg-type]
        take_step(rule, w, torch.randn(2, 5, 4), rule.init_state(w), lr=0.1)
        assert w.isfinite().all() and (w.flatten(1).norm(dim=1) > 0).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bfloat16_weights_follow_the_double_ones(algorithm: str) -> None:
    exact = weight_with_gap(16, 16, gap=0.3, batch=2).bfloat16().double()
    rounded, grad = exact.bfloat16(), torch.randn(2, 16, 16).bfloat16()
    rule = MuonPlusPlusRule(algorithm=algorithm)  # type: ignore[arg-type]
    for w in (exact, rounded):
        take_step(rule, w, grad.to(w.dtype), rule.init_state(w), lr=0.1)
    assert rounded.dtype == torch.bfloat16
    # Entries of at most 1 and vectors u, v rounded to 2^-9, times the slope of msign.
    torch.testing.assert_close(rounded.double(), exact, rtol=0, atol=0.02)
