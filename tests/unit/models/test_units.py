"""Units are views that alias their parameter, cover it, and split it as in an unfused model."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.config import InitConfig, ModelConfig
from models.families import all_units, model_size
from models.initialize import initialize_
from models.units import check_coverage, flat_shape
from spectral.rules import RULES
from spectral.rules.base import take_step
from tests.models import built, drawn, initialized, losses_of, parameters_of
from tests.stepped_models import TINY, assign_matrices, gradient_of, stepped_model
from tests.tiny_families import MODELS, mixture

MODEL = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=12, ffn=20, vocab_size=50)
GRANULARITIES = ["head", "group", "component", "fused"]
CASES = {name: (model, {}) for name, model in MODELS.items()} | {
    granularity: (MODEL, {"qkv_units": granularity, "split_gate_up": granularity != "fused"})
    for granularity in GRANULARITIES
}
EVERY_CASE = pytest.mark.parametrize("case", CASES)


@pytest.mark.parametrize("name", MODELS)
def test_the_units_are_what_is_built_and_cover_it_once(name, world):
    model = MODELS[name]
    parameters = built(model)[1]
    for qkv_units, split in product(GRANULARITIES, (True, False)):
        options = {"qkv_units": qkv_units, "split_gate_up": split}
        units = all_units(model, **options)
        check_coverage(units, parameters)
        assert sum(u.numel for u in units) == sum(p.numel() for p in parameters.values())
        for rank in range(2):
            units = all_units(model, tensor_rank=rank, tensor_size=2, **options)
            check_coverage(units, parameters_of(units))
            assert len({unit.name for unit in units}) == len(units)
            for unit in units:
                assert flat_shape(unit.axes) == unit.shape
                size = 1 if unit.domain == "expert" else 2
                local = unit.view(parameters_of([unit])[unit.parameter])
                assert local.shape == unit.local_axes(size)


def test_coverage_names_what_is_missing_or_claimed_twice():
    units = all_units(MODEL)
    parameters = parameters_of(units)
    with pytest.raises(
        ValueError, match="attention.qkv must be in exactly one unit, got [1-9].* and 0 elements"
    ):
        check_coverage([u for u in units if u.name != "layers.0.k.1"], parameters)
    with pytest.raises(ValueError, match="must belong to at least one unit"):
        check_coverage([u for u in units if u.role != "head"], parameters)
    with pytest.raises(ValueError, match="parameter head must be .* got 0 elements .* and [1-9]"):
        check_coverage([*units, units[-1]], parameters)
    with pytest.raises(ValueError, match="not a model parameter"):
        check_coverage(units, {k: v for k, v in parameters.items() if k != "head"})


@EVERY_CASE
def test_initial_norms_are_the_radius_of_the_logical_shape(case):
    """Only the embedding and the head keep the standard deviation with which they were drawn."""
    model, options = CASES[case]
    deviations = {"embedding": model.init.embedding_std, "head": model.init.head_std}
    units, parameters = initialized(model, **options)
    for unit in units:
        whole = unit.view(parameters[unit.parameter]).reshape(unit.shape)
        if unit.role in deviations:
            assert whole.std().item() == pytest.approx(deviations[unit.role], rel=0.1), unit.name
        elif unit.is_matrix:
            rows, cols = unit.shape
            norm = torch.linalg.svdvals(whole)[0].item()
            # The draw and its rescaling are float32.
            assert norm == pytest.approx((rows / cols) ** 0.5, rel=1e-5), unit.name


@pytest.mark.parametrize("init", [None, InitConfig(spectral=False, depth_scaled=True)])
@EVERY_CASE
def test_initial_weights_do_not_depend_on_the_layout(case, init):
    model, options = CASES[case]
    model = model if init is None else replace(model, init=init)
    units, parameters = initialized(model, **options)
    whole = {u.name: u.view(parameters[u.parameter]).reshape(u.shape) for u in units}
    seen = set()
    experts = [(0, 0)] if model.moe is None else product(range(2), range(4))
    for tensor_rank, (expert_rank, part) in product(range(2), experts):
        local_units, local = initialized(
            model, (tensor_rank, 2), (part, 4), expert_rank=expert_rank, expert_size=2, **options
        )
        for unit in local_units:
            place = (part, 4) if unit.domain == "expert" else (tensor_rank, 2)
            piece = unit.piece(whole[unit.name], *place)
            assert torch.equal(unit.view(local[unit.parameter]), piece), unit.name
            seen.add(unit.name)
    assert seen == whole.keys()


def test_the_draw_does_not_depend_on_how_weights_are_split():
    """Depth scaling, which applies only to the up projection, does not depend on the division
    either."""
    init = InitConfig(spectral=False, depth_scaled=True, depth_scaling="layer")
    plain = replace(MODEL, layers=1, init=init)
    values = []
    for granularity in GRANULARITIES:
        units = all_units(plain, qkv_units=granularity, split_gate_up=granularity != "fused")
        parameters = parameters_of(units)
        initialize_(parameters, units, plain.init, seed=5, layers=1)
        values.append(parameters)
    for other in values[1:]:
        torch.testing.assert_close(other, values[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "granularity"),
    [*((name, "head") for name in RULES), *(("muon_sphere", g) for g in GRANULARITIES[1:])],
)
def test_fused_weights_get_the_update_of_an_unfused_model(name, granularity, world):
    """Compare all units, including q, k and v heads, gate and up in fused parameters, with separate
    parameters, each with its own learning rate and weight decay. A rule that rescales weights must
    not rescale a copy."""

    def assign(unit):
        assigned = assign_matrices(name)(unit)
        decay = 0.1 if unit.role in ("q", "gate", "embedding") else 0.3
        return replace(assigned, lr=0.02 * (1 + (unit.layer or 0)), weight_decay=decay)

    model, optimizer = stepped_model(TINY, world, assign, qkv_units=granularity)
    units = {unit.name: unit for unit in model.units}

    def weight_of(unit):
        return unit.view(model.parameters[unit.parameter].detach()).reshape(1, *unit.shape)

    separate = {unit: weight_of(units[unit]).clone() for unit in units}
    states = {unit: assign(units[unit]).rule.init_state(separate[unit]) for unit in units}
    for _ in range(3):
        gradients = {
            name: gradient_of(model, unit).normal_().reshape(1, *unit.shape).clone()
            for name, unit in units.items()
        }
        optimizer.step(1.0, torch.tensor(True))
        for unit, weight in separate.items():
            own, given = assign(units[unit]), (weight, gradients[unit], states[unit])
            take_step(own.rule, *given, lr=own.lr, weight_decay=own.weight_decay)
    qkv = {"head": 4 + 2 + 2, "group": 3 * 2, "component": 3, "fused": 1}[granularity]
    assert len(separate) == 2 * (qkv + 6) + 3
    for unit, weight in separate.items():
        torch.testing.assert_close(weight_of(units[unit]), weight, rtol=1e-10, atol=1e-12)


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


@pytest.mark.parametrize("name", MODELS)
def test_flops_of_a_token_are_those_of_the_products(name, world):
    """PyTorch's plain attention also computes masked scores, so each token attends to the whole
    sequence. This is the mean number of keys in a sequence of twice the length."""
    model = replace(MODELS[name], attention_softcap=None, sliding_window=None)
    chunk, _ = drawn(model)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        losses = losses_of(chunk)
        losses.sum().backward()
    flops = model_size(model, 2 * losses.shape[1]).flops_per_token * losses.numel()
    assert counter.get_total_flops() == flops
