"""Radius, retraction, initialisation and scales."""

import math

import pytest
import torch

from spectral.scaling import update_scale
from spectral.sphere import dynamic_factor, radius, retract_hard_


def test_scales_of_the_paper() -> None:
    assert update_scale((128, 2048), "spectral_mup") == pytest.approx(0.25)
    assert update_scale((128, 2048), "align_adam_rms") == pytest.approx(0.2 * math.sqrt(2048))
    assert update_scale((128, 2048), "spectral_kaiming") == 1.0
    assert update_scale((6144, 2048), "spectral_kaiming") == pytest.approx(math.sqrt(3))
    with pytest.raises(ValueError, match="mode must be one of"):
        update_scale((2, 2), "mup")
    with pytest.raises(ValueError, match="shape must have dimensions of at least 1"):
        update_scale((0, 2), "spectral_mup")


def test_radius_has_the_scaler_and_the_update_scale_has_not() -> None:
    assert radius((6144, 2048), "spectral_mup", 2.0) == pytest.approx(2 * math.sqrt(3))
    with pytest.raises(ValueError, match="scaler must be positive, got 0"):
        radius((2, 2), scaler=0)


def test_a_norm_that_is_zero_or_not_finite_leaves_the_weight() -> None:
    w = torch.randn(4, 3, 5)
    before = w.clone()
    retract_hard_(w, torch.tensor([0.0, torch.inf, torch.nan, 0.5]), 2.0)
    assert torch.equal(w[:3], before[:3]) and torch.equal(w[3], 4 * before[3])


def test_the_dynamic_factor_moves_towards_the_radius_by_rate_times_lr() -> None:
    factor = dynamic_factor(torch.tensor([0.5, 1.0, 2.0]), 1.0, rate=0.1, lr=0.02)
    torch.testing.assert_close(factor, torch.tensor([1.002, 1.0, 0.998]))
