"""Units of mixture-of-experts layers: who has which, their shapes and their first draw."""

from dataclasses import replace

import pytest

from models.config import InitConfig
from models.size import all_units, model_size
from models.units import check_coverage
from tests.models import initialized, parameters_of
from tests.moe_models import MODEL, model_with

GATED = model_with(shared_gate=True)


@pytest.mark.parametrize("expert_tensor", [1, 4])
@pytest.mark.parametrize("split", [True, False])
def test_units_of_experts_are_shared_out_once(split, expert_tensor):
    experts = []
    for rank in range(2):
        layout = {"tensor_rank": rank, "expert_rank": rank, "expert_tensor": expert_tensor}
        units = all_units(GATED, split_gate_up=split, tensor_size=2, expert_size=2, **layout)
        check_coverage(units, parameters_of(units))
        for unit in units:
            assert (unit.domain == "expert") == (".experts." in unit.name), unit.name
            assert unit.role.startswith("expert_") == (unit.domain == "expert")
            if unit.domain == "expert":
                assert (unit.shard_axis is not None) == (expert_tensor > 1)
                assert not unit.replicated
            if "shared" in unit.name and unit.role != "shared_router":
                assert unit.shard_axis is not None
        experts += [unit.name for unit in units if unit.domain == "expert"]
    whole = [u.name for u in all_units(GATED, split_gate_up=split) if u.domain == "expert"]
    assert sorted(experts) == sorted(whole)
    assert len(whole) == 2 * 4 * (3 if split else 2)


@pytest.mark.parametrize(
    ("scaling", "squares", "scaled"), [("layers", (6, 6, 6), ()), ("layer", (2, 4, 6), ("up",))]
)
def test_depth_scaling_reaches_the_outputs_of_every_layer_and_expert(scaling, squares, scaled):
    init = InitConfig(spectral=False, depth_scaled=True, depth_scaling=scaling, std=1.0)
    units, parameters = initialized(replace(GATED, init=init))
    for unit in units:
        ends = unit.role.rpartition("_")[2]
        if unit.is_matrix and unit.layer is not None and unit.numel >= 512:
            goal = squares[unit.layer] ** -0.5 if ends in ("o", "down", *scaled) else 1.0
            # At least 512 draws: four standard errors are 12.5%.
            std = unit.view(parameters[unit.parameter]).std().item()
            assert std == pytest.approx(goal, rel=0.125), unit.name


def test_model_size_counts_a_known_mixture():
    size = model_size(MODEL, sequence_length=10)
    attention = 3 * (32 * 12 * (4 + 2 + 2) + 32 * 12 * 4)
    expert = 3 * 32 * 16
    gains = 3 * (2 * 32 + 2 * 12) + 32
    fixed = attention + 3 * 32 * 48 + 2 * (2 * expert + 4 * 32)
    vocabulary = 128 * 32
    assert size.parameters == fixed + gains + 2 * 4 * expert + 2 * vocabulary
    assert size.active_parameters == fixed + gains + 2 * 2 * expert + 2 * vocabulary
    assert size.flops_per_token == 6 * (fixed + 2 * 2 * expert + vocabulary) + 6 * 3 * 48 * 10
