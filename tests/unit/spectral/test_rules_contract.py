"""The contract of every update rule."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from spectral.device_values import unless_all
from spectral.rules import RULES, MomentumRule, MsignRule, Report, Rule, State, register_rule
from spectral.rules.base import class_problems, take_step
from spectral.sphere import spectral_init_
from tests.step_trace import as_on_a_device

SHAPE = (3, 24, 40)
# Within one step Muon++ also rescales to the radius; its update alone is that of algorithm 1. SSO
# steps as on a GPU, without checks for an early exit.
OPTIONS: dict[str, dict[str, object]] = {
    "muon_plus_plus": {"algorithm": "project"},
    "spectral_sphere": {"early_exit": False},
}
ALL = pytest.mark.parametrize("name", RULES)
OTHERS: dict[str, Rule] = {
    f"muon_plus_plus {algorithm}": RULES["muon_plus_plus"](algorithm=algorithm)  # type: ignore[call-arg]
    for algorithm in ("project_rescale", "dual")
} | {"muon_sphere dynamic": RULES["muon_sphere"](retraction="dynamic")}  # type: ignore[call-arg]
EVERY_FORM = pytest.mark.parametrize("name", [*RULES, *OTHERS])


def make(name: str) -> Rule:
    return OTHERS[name] if name in OTHERS else RULES[name](**OPTIONS.get(name, {}))


def start(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return weights that are on their spheres, and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    weight = spectral_init_(torch.empty(SHAPE), generator=generator)
    return weight, torch.randn(SHAPE, generator=generator)


def run(rule: Rule, steps: int = 3, **options: object) -> tuple[Tensor, State, Report]:
    weight, grad = start()
    state, report = rule.init_state(weight), {}
    for step in range(steps):
        report = take_step(rule, weight, grad.roll(step, -1).clone(), state, lr=1e-2, **options)  # type: ignore[arg-type]
    return weight, state, report


@ALL
def test_plans_count_the_work_of_every_rule(name: str) -> None:
    """If a whole-matrix rule does not define `cost`, plans omit its work and say so."""
    assert RULES[name].costs_are_counted() is (name != "normalized")
    uncounted = type("Own", (MomentumRule,), {"update": RULES["muon"].update})
    assert not uncounted.costs_are_counted() and MsignRule.costs_are_counted()


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        (
            {"init_state": lambda _, w: {"s": w[0]}},
            r"create the state s with a shape that starts with \[2\] .* got \(3, 4\)",
        ),
        (
            {"elementwise_state": ("s",)},
            r"create the state s with a shape that starts with \[2, 3, 4\] .* got none",
        ),
        ({"__annotations__": {"beta": float}}, "define a default for its field beta"),
    ],
)
def test_a_class_that_is_no_rule_is_refused(attributes: dict[str, object], said: str) -> None:
    own = dataclass(frozen=True, kw_only=True)(type("Own", (RULES["muon"],), attributes))
    with pytest.raises(TypeError, match=f"rule 'own' must {said}"):
        register_rule("own", own)


@ALL
def test_state_is_complete_from_construction(name: str) -> None:
    rule = make(name)
    weight, _ = start()
    initial = rule.init_state(weight)
    _, after, report = run(rule)
    assert {k: (v.shape, v.dtype) for k, v in initial.items()} == {
        k: (v.shape, v.dtype) for k, v in after.items()
    }
    assert not list(class_problems(RULES[name]))
    assert all(v.shape == (len(weight),) for v in report.values())


@EVERY_FORM
@pytest.mark.parametrize("fresh", [True, False])
def test_inactive_step_changes_no_bit(name: str, fresh: bool) -> None:
    rule = make(name)
    weight, state, _ = run(rule)
    if fresh:
        state = rule.init_state(weight)
    before = weight.clone(), {k: v.clone() for k, v in state.items()}
    poison = torch.full(SHAPE, torch.nan)
    rates = {"lr": torch.tensor(0.1), "weight_decay": 0.1}
    take_step(rule, weight, poison, state, active=torch.tensor(False), **rates)  # type: ignore[arg-type]
    assert torch.equal(weight, before[0])
    assert all(torch.equal(v, before[1][k]) for k, v in state.items())


@EVERY_FORM
def test_one_graph_with_a_gate_and_device_scalars_is_the_plain_step(name: str) -> None:
    """A single graph contains no data-dependent control flow, which would have to wait for a
    GPU."""
    rule = make(name)
    weight, grad = (x[:, :8, :6].contiguous() for x in start())
    gated, (state, other) = weight.clone(), (rule.init_state(weight) for _ in range(2))

    def gated_step(w: Tensor, grad: Tensor, lr: Tensor, decay: Tensor, gate: Tensor) -> Report:
        return take_step(rule, w, grad, state, lr=lr, weight_decay=decay, active=gate)

    # For other rules the compiler loses a global, or treats a size as a symbol.
    if name in ("adamw", "muon", "muon_plus_plus project_rescale", "spectral_descent"):
        gated_step = torch.compile(gated_step, fullgraph=True, backend="eager")
    for _ in range(2):
        rates = torch.tensor(0.01), torch.tensor(0.1)
        gated_step(gated, grad.clone(), *rates, torch.tensor(True))
        take_step(rule, weight, grad.clone(), other, lr=0.01, weight_decay=0.1)
    # float32 products in another order.
    torch.testing.assert_close(weight, gated, rtol=1e-5, atol=1e-6)


@ALL
@pytest.mark.parametrize("unsound", [False, True])
def test_what_the_host_knows_of_a_predicate_changes_no_bit(name: str, unsound: bool) -> None:
    def stepped() -> State:
        weight, grad = start()
        state, on = rule.init_state(weight), torch.tensor(True)
        for turn in range(3):
            if unsound and turn == 1:
                grad[1, 0, 0] = torch.nan
            take_step(rule, weight, grad.clone(), state, lr=0.01, weight_decay=0.1, active=on)
        return {**state, "weight": weight}

    rule = make(name)
    here = stepped()
    with as_on_a_device():
        there = stepped()
    torch.testing.assert_close(here, there, rtol=0, atol=0, equal_nan=True)


def test_a_predicate_is_left_out_only_where_the_host_knows_it_at_no_cost() -> None:
    on, off = torch.tensor([True, True]), torch.tensor([True, False])
    assert unless_all(None) is None and unless_all(on) is None and unless_all(off) is off
    meta = torch.ones(2, dtype=torch.bool, device="meta")
    assert unless_all(meta) is meta
    with FakeTensorMode():
        fake = torch.ones(2, dtype=torch.bool)
        assert unless_all(fake) is fake
    inside = torch.compile(lambda x: x if unless_all(x) is None else ~x, backend="eager")
    assert torch.equal(inside(on), ~on)


@ALL
def test_zero_gradient_moves_nothing_beyond_decay(name: str) -> None:
    weight, grad = start()
    before, rule = weight.clone(), make(name)
    take_step(rule, weight, torch.zeros_like(grad), rule.init_state(weight), lr=0.01)
    # Sphere rules rescale by R / sigma, which is 1 to the accuracy of sigma.
    torch.testing.assert_close(weight, before, rtol=2e-6, atol=1e-8)


@ALL
def test_update_has_the_reported_size(name: str) -> None:
    weight, grad = start()
    before, rule = weight.clone(), make(name)
    state = rule.init_state(weight)
    report = take_step(rule, weight, grad.clone(), state, lr=0.1)
    if "update_rms" not in report:
        return
    moved = (before - weight).flatten(1).square().mean(1).sqrt() / 0.1
    torch.testing.assert_close(moved, report["update_rms"], rtol=1e-4, atol=0)


@ALL
def test_rates_of_single_matrices_are_refused(name: str) -> None:
    weight, grad = start()
    rule, rates = make(name), torch.ones(len(weight))
    with pytest.raises(ValueError, match=r"lr must be a number or a 0-d tensor, got shape \(3,\)"):
        take_step(rule, weight, grad, rule.init_state(weight), lr=rates)


@ALL
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_radius_and_scale_are_those_of_a_step(name: str, shape: tuple[int, int]) -> None:
    """The values shown by routing equal the values used in a step."""
    rule = make(name)
    weight = spectral_init_(torch.empty(2, *shape, dtype=torch.float64))
    before, grad = weight.clone(), torch.randn(2, *shape, dtype=torch.float64)
    report = take_step(rule, weight, grad, rule.init_state(weight), lr=1e-3)
    radius, scale = rule.radius_of(shape), rule.scale_of(shape)
    assert (radius is not None) == ("radius" in report)
    if radius is not None:
        assert report["radius"].tolist() == [radius] * 2
        if rule.scale_of(shape) is not None and "gap" not in report:
            norm = torch.linalg.matrix_norm(before, ord=2)
            torch.testing.assert_close(norm, torch.full_like(norm, radius))
    if scale is not None:
        # The direction has singular values near 1, of which msign's error at 8 steps is below 1%.
        moved = torch.linalg.matrix_norm(before - weight, ord=2)
        assert moved.tolist() == pytest.approx([1e-3 * scale] * 2, rel=0.02)


@EVERY_FORM
def test_a_rule_says_whether_it_rescales_weights_to_the_radius(name: str) -> None:
    rule = make(name)
    weight, grad = start()
    weight *= 2
    take_step(rule, weight, grad, rule.init_state(weight), lr=0.0)
    norms = torch.linalg.matrix_norm(weight, ord=2).tolist()
    radius = math.sqrt(24 / 40)
    assert norms == pytest.approx([radius if rule.rescales else 2 * radius] * 3, rel=1e-4)


@ALL
def test_only_a_rule_that_waits_for_the_device_cannot_be_captured(name: str) -> None:
    rule = make(name)
    assert rule.waiting_field is None
    if name == "spectral_sphere":
        assert RULES[name](early_exit=True).waiting_field == "early_exit"  # type: ignore[call-arg]


@ALL
def test_elementwise_rules_work_on_any_slice(name: str) -> None:
    rule = make(name)
    if rule.whole_matrix:
        rows = torch.zeros(2, 3, 5, 2)
        with pytest.raises(ValueError, match=r" matrices \[batch, rows, cols\]"):
            take_step(rule, rows, rows.clone(), rule.init_state(rows), lr=0.01)
        return
    weight, grad = (x.flatten(1) for x in start())
    part = weight[:, 100:217].clone()
    take_step(rule, weight, grad.clone(), rule.init_state(weight), lr=0.01)
    take_step(rule, part, grad[:, 100:217].clone(), rule.init_state(part), lr=0.01)
    assert torch.equal(part, weight[:, 100:217])


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("adamw", {"beta1": 1.5}),
        ("adamw", {"epsilon": 0}),
        ("muon", {"momentum": -0.1}),
        ("muon", {"schedule": "cubic"}),
        ("muon", {"steps": 0}),
        ("muon", {"scale": "none"}),
        ("muon", {"scale_factor": 0}),
        ("muon", {"msign_dtype": "int8"}),
        ("muon_sphere", {"radius": "x"}),
        ("muon_sphere", {"radius_scaler": -1}),
        ("muon_sphere", {"retraction": "soft"}),
        ("muon_sphere", {"retraction_rate": -1}),
        ("muon_sphere", {"krylov_steps": 0}),
        ("spectral_sphere", {"tolerance": 0}),
        ("spectral_sphere", {"max_evaluations": 0}),
        ("spectral_sphere", {"tolerance": 1e-4, "msign_dtype": "float16"}),
        ("muon_plus_plus", {"algorithm": "rescale"}),
        ("muon_plus_plus", {"correlation_threshold": 0}),
        ("muon_plus_plus", {"correlation_rescale": True}),
    ],
)
def test_bad_fields_are_named(name: str, fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(fields))} must"):
        RULES[name](**fields)
