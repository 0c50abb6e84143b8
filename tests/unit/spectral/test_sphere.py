"""Scales and retractions."""

import math

import pytest
import torch

from spectral.rules import MuonSphereRule
from spectral.sphere import SCALES, dynamic_factor, hard_factor, radius


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


def test_the_dynamic_factor_moves_towards_the_radius_by_rate_times_lr() -> None:
    factor = dynamic_factor(torch.tensor([0.5, 1.0, 2.0]), 1.0, rate=0.1, lr=0.02)
    torch.testing.assert_close(factor, torch.tensor([1.002, 1.0, 0.998]))
