"""Scales and retractions, and MuonSphere and SSO on the sphere, compared with a float64 SVD."""

import math

import pytest
import torch
from torch import Tensor

from spectral import MuonSphere
from spectral.rules import RULES, MuonSphereRule, SpectralSphereRule
from spectral.rules.base import take_step
from spectral.sphere import SCALES, hard_factor, radius, spectral_init_


def norms(weight: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(weight.double(), ord=2)


def gradients(shape: tuple[int, ...], steps: int) -> Tensor:
    """Return tensors like gradients: a constant direction plus noise."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(shape, generator=generator)
    return mean + torch.randn(steps, *shape, generator=generator)


@pytest.mark.parametrize("name", ["muon_sphere", "spectral_sphere"])
@pytest.mark.parametrize("shape", [(2, 96, 96), (2, 32, 128), (2, 128, 32), (1, 1, 16)])
@pytest.mark.parametrize("initialised", [True, False])
def test_every_step_ends_near_the_radius(name, shape, initialised) -> None:
    """From any Gaussian start, the norm is within 1e-2 of R after every step with lr 5e-3, because
    the retraction is exact and a step of length lr R moves a singular value by at most lr R."""
    weight = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if initialised:
        spectral_init_(weight, generator=torch.Generator().manual_seed(0))
    rule = RULES[name](radius_scaler=2.0)
    state, target = rule.init_state(weight), radius(shape[1:], scaler=2.0)
    for grad in gradients(shape, 15):
        before = norms(weight)
        report = take_step(rule, weight, grad.clone(), state, lr=5e-3, weight_decay=0.1)
        # decay by lr wd, then the rule's norm, accurate to float32 rounding and iteration
        torch.testing.assert_close(report["sigma"].double(), before * (1 - 5e-4), rtol=1e-3, atol=0)
        assert (norms(weight) / target - 1).abs().max() < 1e-2


def test_spectral_sphere_steps_are_tangent() -> None:
    """To first order, an SSO step does not change <Theta, W> = R, but a MuonSphere step does."""
    generator = torch.Generator().manual_seed(0)
    start = spectral_init_(torch.empty(2, 48, 64), generator=generator)
    u, _, vh = torch.linalg.svd(start.double(), full_matrices=False)
    theta = u[:, :, :1] @ vh[:, :1]
    grad = torch.randn(2, 48, 64, generator=generator) + 3 * theta.float()
    moved = {}
    for rule in (SpectralSphereRule(), MuonSphereRule()):
        weight = start.clone()
        take_step(rule, weight, grad.clone(), rule.init_state(weight), lr=1e-2)
        change = (theta * (weight.double() - start.double())).sum((-2, -1)).abs()
        moved[type(rule).__name__] = change / (1e-2 * radius((48, 64)))
    assert moved["SpectralSphereRule"].max() < 5e-4  # the tolerance, and sigma's accuracy
    assert moved["MuonSphereRule"].min() > 0.1


def test_weight_decay_of_the_same_rate_stops_dynamic_retraction() -> None:
    """Below the sphere, retraction multiplies the weight by 1 + rate lr, and decay by 1 - rate
    lr."""
    rule = MuonSphereRule(retraction="dynamic", retraction_rate=0.1)

    def end(start: float, decay: float, steps: int) -> float:
        weight = start * spectral_init_(torch.empty(1, 24, 24), generator=torch.Generator())
        state = rule.init_state(weight)
        for _ in range(steps):
            take_step(rule, weight, torch.zeros(1, 24, 24), state, lr=0.01, weight_decay=decay)
        return norms(weight).item()

    assert end(0.8, 0.0, 40) == pytest.approx(0.8 * 1.001**40, rel=1e-4)
    assert end(0.8, 0.1, 40) == pytest.approx(0.8, rel=1e-3)
    assert end(1.5, 0.0, 40) == pytest.approx(1.5 * 0.999**40, rel=1e-4)
    # The norm after the decay decides.
    assert end(1.05, 10.0, 1) == pytest.approx(1.05 * 0.9 * 1.001, rel=1e-5)
    assert rule.decay_problem(0.0) is None
    assert MuonSphereRule().decay_problem(0.1) is None
    with pytest.warns(UserWarning, match="weight_decay must be 0 with retraction dynamic"):
        MuonSphere([torch.nn.Parameter(torch.eye(8))], retraction="dynamic")
    MuonSphere([torch.nn.Parameter(torch.eye(8))], retraction="dynamic", weight_decay=0.0)


def test_scales_of_the_paper() -> None:
    assert SCALES["spectral_mup"](128, 2048) == pytest.approx(0.25)
    assert SCALES["align_adam_rms"](128, 2048) == pytest.approx(0.2 * math.sqrt(2048))
    assert SCALES["spectral_kaiming"](128, 2048) == 1.0
    assert SCALES["spectral_kaiming"](6144, 2048) == pytest.approx(math.sqrt(3))


def test_radius_has_the_scaler_and_the_update_scale_has_not() -> None:
    rule = MuonSphereRule(radius_scaler=2.0)
    assert rule.radius_of((6144, 2048)) == radius((6144, 2048), scaler=2.0)
    assert radius((6144, 2048)) == pytest.approx(math.sqrt(3))
    assert rule.scale_of((6144, 2048)) == pytest.approx(math.sqrt(3))


def test_a_norm_that_is_zero_or_not_finite_leaves_the_weight() -> None:
    factor = hard_factor(torch.tensor([0.0, torch.inf, torch.nan, 0.5]), 2.0)
    assert factor.tolist() == [1, 1, 1, 4]
