"""The nuclear-norm step: its guarantee, published trajectories, and the step for gains."""

import math

import pytest
import torch
from torch import Tensor

from spectral.rules import SpectralDescentRule
from spectral.rules.base import take_step


def random_features() -> tuple[Tensor, Tensor]:
    """Return the ReLU random-feature problem of the criterion paper, figure 3: A and Y = W# A."""
    torch.manual_seed(0)
    x = torch.randn(50, 400, dtype=torch.float64)
    v = torch.randn(100, 50, dtype=torch.float64) / math.sqrt(50)
    truth = torch.randn(100, 100, dtype=torch.float64) / math.sqrt(100)
    a = torch.relu(v @ x)
    return a, truth @ a


def loss_and_grad(w: Tensor, a: Tensor, y: Tensor) -> tuple[float, Tensor]:
    gap = w @ a - y
    return float(gap.square().sum() / (2 * a.shape[1])), gap @ a.mT / a.shape[1]


@pytest.mark.parametrize("size", [1.0, 1e160])
def test_step_is_the_nuclear_norm_times_the_polar_factor(size: float) -> None:
    """Gradients whose squares overflow are also tested."""
    weight, grad = torch.randn(2, 3, 9, 6, dtype=torch.float64)
    grad, lr = size * grad, 0.1 / size
    left, sigma, right = torch.linalg.svd(grad, full_matrices=False)
    expected = 0.9 * weight - lr * sigma.sum(-1)[:, None, None] * (left @ right)
    rule = SpectralDescentRule(steps=14)
    report = take_step(rule, weight, grad.clone(), {}, lr=lr, weight_decay=0.1 / lr)
    # Fourteen steps of msign converge quadratically to the polar factor of these matrices.
    torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(report["dual_norm"], sigma.sum(-1), rtol=1e-9, atol=0)
    rms = sigma.sum(-1) * math.sqrt(6 / 54)
    torch.testing.assert_close(report["update_rms"], rms, rtol=1e-9, atol=0)


def test_step_on_gains_is_the_one_norm_times_the_signs() -> None:
    gain = torch.ones(2, 4, dtype=torch.float64)
    grad = torch.tensor([[1.0, -2.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    report = take_step(SpectralDescentRule(), gain, grad.clone(), {}, lr=0.1)
    expected = torch.tensor([[0.65, 1.35, 1.0, 0.65], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(gain, expected)
    assert report["dual_norm"].tolist() == [3.5, 0.0]


def test_published_losses_of_the_random_feature_model() -> None:
    a, y = random_features()
    published = {0: 27.47, 1: 3.07, 5: 0.433, 10: 0.158, 50: 0.0143, 100: 4.3e-3}
    rule, lr = SpectralDescentRule(steps=20), a.shape[1] / float(a.square().sum())
    w = torch.zeros(1, 100, 100, dtype=torch.float64)
    for t in range(101):
        loss, grad = loss_and_grad(w[0], a, y)
        if t in published:
            assert loss == pytest.approx(published[t], rel=0.01)  # printed with three digits
        take_step(rule, w, grad[None].clone(), {}, lr=lr)


@pytest.mark.parametrize("steps", [5, 8])
def test_decrease_is_at_least_the_guarantee(steps: int) -> None:
    # ||G||_*^2 / (2 L) with L = ||A||_F^2 / n; with an inexact polar factor of norm 1 + e it is
    # <G, D>^2 (2 - (1 + e)^2) / (2 L). Eight steps overshoot by less than 1e-6, five by 0.13.
    a, y = random_features()
    curvature = float(a.square().sum()) / a.shape[1]
    overshoot = {5: 0.13, 8: 1e-6}[steps]
    w = torch.zeros(1, 100, 100, dtype=torch.float64)
    for _ in range(10):
        before, grad = loss_and_grad(w[0], a, y)
        rule = SpectralDescentRule(steps=steps)
        report = take_step(rule, w, grad[None].clone(), {}, lr=1 / curvature)
        bound = float(report["dual_norm"]) ** 2 / (2 * curvature) * (2 - (1 + overshoot) ** 2)
        assert before - loss_and_grad(w[0], a, y)[0] >= bound
        if steps == 8:
            nuclear = float(torch.linalg.svdvals(grad).sum())
            assert float(report["dual_norm"]) == pytest.approx(nuclear, rel=0.02)
