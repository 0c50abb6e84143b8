"""Units: their views alias the parameter, cover it, and split it as an unfused model would."""

from dataclasses import replace

import pytest
import torch

from models.config import InitConfig, ModelConfig
from models.initialize import initialize_
from models.size import all_units, model_size
from models.units import check_coverage, flat_shape
from spectral.rules import RULES
from spectral.rules.base import take_step
from spectral.rules.spectral_sphere import SpectralSphereRule
from tests.models import initialized, parameters_of

MODEL = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=12, ffn=20, vocab_size=50)
GRANULARITIES = ["head", "group", "component", "fused"]


@pytest.mark.parametrize("tensor_size", [1, 2])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_units_cover_every_parameter_once(granularity, split, tensor_size):
    for rank in range(tensor_size):
        units = all_units(
            MODEL,
            qkv_units=granularity,
            split_gate_up=split,
            tensor_rank=rank,
            tensor_size=tensor_size,
        )
        check_coverage(units, parameters_of(units))
        assert len({unit.name for unit in units}) == len(units)
        for unit in units:
            assert flat_shape(unit.axes) == unit.shape
            assert unit.view(parameters_of([unit])[unit.parameter]).shape == unit.local_axes(
                tensor_size
            )


def test_coverage_names_what_is_missing_or_claimed_twice():
    units = all_units(MODEL)
    parameters = parameters_of(units)
    with pytest.raises(ValueError, match="layers.0.attention.qkv do not cover it exactly once"):
        check_coverage([u for u in units if u.name != "layers.0.k.1"], parameters)
    with pytest.raises(ValueError, match="claimed by no unit"):
        check_coverage([u for u in units if u.role != "head"], parameters)
    with pytest.raises(ValueError, match="head do not cover it exactly once"):
        check_coverage([*units, units[-1]], parameters)
    with pytest.raises(ValueError, match="which the model lacks"):
        check_coverage(units, {k: v for k, v in parameters.items() if k != "head"})


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_writing_a_unit_writes_the_parameter(granularity):
    units, parameters = initialized(MODEL, qkv_units=granularity)
    for unit in units:
        view = unit.view(parameters[unit.parameter])
        assert view.untyped_storage().data_ptr() == (
            parameters[unit.parameter].untyped_storage().data_ptr()
        )
        before = parameters[unit.parameter].clone()
        view.mul_(2.0)
        changed = (parameters[unit.parameter] != before).sum().item()
        assert changed == unit.numel


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_initial_norms_are_the_radius_of_the_logical_shape(granularity):
    units, parameters = initialized(MODEL, qkv_units=granularity)
    for unit in units:
        if unit.role in ("embedding", "head", "gain"):
            continue
        whole = unit.view(parameters[unit.parameter]).reshape(unit.shape)
        rows, cols = unit.shape
        norm = torch.linalg.svdvals(whole)[0].item()
        # The draw and its rescaling are float32.
        assert norm == pytest.approx((rows / cols) ** 0.5, rel=1e-5), unit.name


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_initial_weights_do_not_depend_on_tensor_parallelism(granularity):
    units, parameters = initialized(MODEL, qkv_units=granularity, split_gate_up=False)
    whole = {u.name: (u, u.view(parameters[u.parameter]).reshape(u.shape)) for u in units}
    seen = set()
    for rank in range(2):
        local_units, local = initialized(
            MODEL, (rank, 2), qkv_units=granularity, split_gate_up=False
        )
        for unit in local_units:
            piece = unit.piece(whole[unit.name][1], rank, 2)
            assert torch.equal(unit.view(local[unit.parameter]), piece), unit.name
            seen.add(unit.name)
    assert seen == whole.keys()


def test_the_draw_does_not_depend_on_how_weights_are_split():
    """Nor does its scale by depth, which of gate and up only up has."""
    init = InitConfig(spectral=False, depth_scaled=True, depth_scaling="layer")
    plain = replace(MODEL, layers=1, init=init)
    values = []
    for granularity in GRANULARITIES:
        units = all_units(plain, qkv_units=granularity, split_gate_up=granularity != "fused")
        parameters = parameters_of(units)
        initialize_(parameters, units, plain.init, seed=5, layers=1)
        values.append(parameters)
    for other in values[1:]:
        for name, value in values[0].items():
            assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_step_with_rate_zero_retracts_the_parameter_itself(granularity, one_process_model):
    """The reference implementation loses this for `component`: its rescale hits a copy."""
    model, step = one_process_model(SpectralSphereRule(), qkv_units=granularity)
    for parameter in model.parameters.values():
        parameter.data.mul_(1.7)
    step(lr=0.0)
    for unit in model.units:
        if unit.role in ("embedding", "head", "gain"):
            continue
        whole = unit.view(model.parameters[unit.parameter].detach()).reshape(unit.shape)
        rows, cols = unit.shape
        norm = torch.linalg.svdvals(whole)[0].item()
        # The accuracy of the block Krylov estimate of the norm.
        assert norm == pytest.approx((rows / cols) ** 0.5, rel=1e-6), unit.name


@pytest.mark.parametrize("name", list(RULES))
def test_fused_weights_get_the_update_of_an_unfused_model(name, one_process_model):
    """q, k, v heads, gate and up inside fused parameters against separate plain matrices."""
    rule = RULES[name]()
    model, step = one_process_model(rule)
    separate = {
        unit.name: unit.view(model.parameters[unit.parameter].detach())
        .reshape(1, *unit.shape)
        .clone()
        for unit in model.units
        if unit.role in ("q", "k", "v", "gate", "up")
    }
    states = {unit: rule.init_state(weight) for unit, weight in separate.items()}
    for _ in range(3):
        gradients = step(lr=0.02)
        for unit, weight in separate.items():
            take_step(
                rule, weight, gradients[unit][None].clone(), states[unit], lr=0.02, weight_decay=0.1
            )
    assert len(separate) == 2 * (4 + 2 + 2 + 2)
    for unit in model.units:
        if unit.name in separate:
            ours = unit.view(model.parameters[unit.parameter].detach()).reshape(1, *unit.shape)
            torch.testing.assert_close(ours, separate[unit.name], rtol=1e-10, atol=1e-12)


def test_model_size_counts_known_models():
    tiny = ModelConfig(layers=1, hidden=8, heads=2, ffn=16, vocab_size=32, vocab_multiple=32)
    size = model_size(tiny, sequence_length=10)
    matrices = 4 * 8 * 8 + 3 * 8 * 16
    assert size.parameters == matrices + 2 * 32 * 8 + 3 * 8
    # 6 per matrix element and head element, and causal attention 6 * layers * width * length.
    assert size.flops_per_token == 6 * (matrices + 32 * 8) + 6 * 1 * 8 * 10
