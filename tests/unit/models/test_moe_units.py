"""Units of mixture-of-experts layers: their first draw and their number."""

from dataclasses import replace

import pytest

from models.config import InitConfig
from models.size import model_size
from tests.families import mixture
from tests.models import initialized


@pytest.mark.parametrize(
    ("scaling", "squares", "scaled"), [("layers", (6, 6, 6), ()), ("layer", (2, 4, 6), ("up",))]
)
def test_depth_scaling_reaches_the_outputs_of_every_layer_and_expert(scaling, squares, scaled):
    init = InitConfig(spectral=False, depth_scaled=True, depth_scaling=scaling, std=1.0)
    units, parameters = initialized(replace(mixture(shared_gate=True), init=init))
    for unit in units:
        ends = unit.role.rpartition("_")[2]
        if unit.is_matrix and unit.layer is not None and unit.numel >= 512:
            goal = squares[unit.layer] ** -0.5 if ends in ("o", "down", *scaled) else 1.0
            # At least 512 draws: four standard errors are 12.5%.
            std = unit.view(parameters[unit.parameter]).std().item()
            assert std == pytest.approx(goal, rel=0.125), unit.name


def test_model_size_counts_a_known_mixture():
    size = model_size(mixture(), sequence_length=10)
    attention = 3 * (32 * 12 * (4 + 2 + 2) + 32 * 12 * 4)
    expert = 3 * 32 * 16
    gains = 3 * (2 * 32 + 2 * 12) + 32
    fixed = attention + 3 * 32 * 48 + 2 * (2 * expert + 4 * 32)
    vocabulary = 128 * 32
    assert size.parameters == fixed + gains + 2 * 4 * expert + 2 * vocabulary
    assert size.active_parameters == fixed + gains + 2 * 2 * expert + 2 * vocabulary
    assert size.flops_per_token == 6 * (fixed + 2 * 2 * expert + vocabulary) + 6 * 3 * 48 * 10
