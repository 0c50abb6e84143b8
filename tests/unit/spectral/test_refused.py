"""Steps that are not finite or bounded are refused: for any input, the weights stay the same bit
for bit."""

import copy
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from spectral.polar import CACHE_ELEMENTS, SCHEDULES, coefficients, is_bounded, largest_value
from spectral.rules import RULES, Rule, State
from spectral.rules.base import refused, take_step, taken
from spectral.sphere import spectral_init_
from tests.step_trace import without_eigensolvers

BATCH, ROWS, COLS = 3, 12, 40
POISONS = [float("nan"), float("inf"), 1e30]
HALVES = [torch.bfloat16, torch.float16]
# Every rule that computes its direction from norms, with options that change the path of a step.
CASES: dict[str, Rule] = {
    **{name: rule() for name, rule in RULES.items() if name != "adamw"},
    **{
        f"{name} {dtype}": RULES[name](msign_dtype=dtype)  # type: ignore[call-arg]
        for name in ("muon", "muon_sphere", "spectral_descent")
        for dtype in ("float16", "bfloat16")
    },
    "spectral_sphere float16": RULES["spectral_sphere"](msign_dtype="float16"),  # type: ignore[call-arg]
    "muon_sphere dynamic": RULES["muon_sphere"](retraction="dynamic"),  # type: ignore[call-arg]
    "muon_plus_plus dual": RULES["muon_plus_plus"](algorithm="dual"),  # type: ignore[call-arg]
    "muon_plus_plus correlation": RULES["muon_plus_plus"](  # type: ignore[call-arg]
        algorithm="project", correlation_rescale=True
    ),
}


def gradient(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(BATCH, ROWS, COLS, generator=generator)


def advance(
    rule: Rule,
    weight: Tensor,
    state: State,
    steps: range,
    place: str = "nowhere",
    poison: float = 0.0,
) -> Tensor:
    """Take steps in place, and return the number of refusals of each unit. Before the first step,
    an entry of unit 1 in `place` is set to `poison`."""
    count = torch.zeros(BATCH)
    for step in steps:
        grad = gradient(step)
        tensors = {"weight": weight, "gradient": grad, **state}
        if step == steps[0] and place in tensors:
            tensors[place][1].view(-1)[0] = poison
        before = weight.clone()
        report = take_step(rule, weight, grad, state, lr=1e-2, weight_decay=0.1)
        count += report["refused"]
        assert torch.isfinite(weight[before.isfinite()]).all()
        missed = report["refused"] > 0
        assert_close(weight[missed], before[missed], rtol=0, atol=0, equal_nan=True)
    return count


@cache
def healthy(case: str, steps: int) -> tuple[Tensor, State]:
    """Return the weights and the state of a case after `steps` steps without poison."""
    generator = torch.Generator().manual_seed(0)
    weight = spectral_init_(torch.empty(BATCH, ROWS, COLS), generator=generator)
    state = CASES[case].init_state(weight)
    assert advance(CASES[case], weight, state, range(steps)).sum() == 0
    return weight, state


def places(rule: Rule) -> list[str]:
    weight = torch.ones(BATCH, ROWS, COLS)
    return ["weight", "gradient", *rule.init_state(weight)]


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(
    ("case", "place"), [(case, place) for case, rule in CASES.items() for place in places(rule)]
)
def test_finite_weights_stay_finite(case: str, place: str, poison: float) -> None:
    for at in (0, 2):
        weight, state = copy.deepcopy(healthy(case, at))
        count = advance(CASES[case], weight, state, range(at, 3), place, poison)
        # Other units take their normal steps; products of stacks are unchanged.
        assert torch.equal(weight[::2], healthy(case, 3)[0][::2]) and count[::2].sum() == 0
        # Wrong inputs of the direction are detected. Other wrong values are not: counts, unread
        # entries, and weights without a norm, which the run's checks detect.
        seen = place in ("gradient", "momentum", "u", "v", "second_u", "second_v", "variance")
        if seen and poison != 1e30 and place != "variance":
            assert count[1] > 0, (place, at)


@pytest.mark.parametrize("together", [1, 3, 8])
@pytest.mark.parametrize("case", CASES)
def test_a_matrix_is_refused_alone_in_every_slice_of_a_stack(case, together, monkeypatch) -> None:
    """Test the first, a middle and the last matrix of eight. Only some of the matrices fit into the
    CPU's cache."""
    monkeypatch.setitem(CACHE_ELEMENTS, "cpu", together * ROWS * COLS)
    rule, generator = CASES[case], torch.Generator().manual_seed(0)
    start = spectral_init_(torch.empty(8, ROWS, COLS), generator=generator)
    grad = torch.randn(8, ROWS, COLS, generator=generator)

    def stepped(poisoned: int | None) -> tuple[Tensor, Tensor]:
        weight, given = start.clone(), grad.clone()
        if poisoned is not None:
            given[poisoned, 3, 5] = torch.nan
        report = take_step(rule, weight, given, rule.init_state(weight), lr=1e-2)
        return weight, report["refused"]

    sound, _ = stepped(None)
    for poisoned in (0, 2, 3, 7):
        weight, missed = stepped(poisoned)
        others = torch.arange(8) != poisoned
        assert missed.tolist() == (~others).float().tolist()
        assert torch.equal(weight[others], sound[others]) and weight.isfinite().all()
        assert not torch.equal(sound[poisoned], weight[poisoned])


def stepped_around(rule: Rule, place: str | None) -> tuple[Tensor, Tensor]:
    """Return the weight of unit 1 before and after steps 0 and 2. Between them, step 1 is refused,
    because an entry of `place` is NaN. If `place` is None, there is no step 1."""
    weight = spectral_init_(
        torch.empty(BATCH, ROWS, COLS), generator=torch.Generator().manual_seed(0)
    )
    start, state, rates = weight[1].clone(), rule.init_state(weight), {"weight_decay": 0.1}
    take_step(rule, weight, gradient(0), state, lr=1e-2, **rates)
    if place is not None:
        grad, means = gradient(1), {name: state[name].clone() for name in rule.elementwise_state}
        sound = weight[1].clone()
        {"gradient": grad, "weight": weight, **state}[place][1].view(-1)[0] = torch.nan
        report = take_step(rule, weight, grad, state, lr=1e-2, **rates)
        assert report["refused"].tolist() == [0, 1, 0], place
        weight[1] = sound  # as if from a checkpoint
        state |= means  # means of gradients keep a NaN
    report = take_step(rule, weight, gradient(2), state, lr=1e-2, **rates)
    assert not report["refused"].any(), place
    return start, weight[1]


@without_eigensolvers()
@pytest.mark.parametrize("case", CASES)
def test_a_refused_step_leaves_no_trace_in_the_state(case: str) -> None:
    """Lost singular vectors are computed again, also after a weight has not been finite."""
    rule = CASES[case]
    state = rule.init_state(torch.ones(BATCH, ROWS, COLS))
    vectors = [name for name in ("u", "second_v") if name in state]
    start, expected = stepped_around(rule, None)
    for place in ("gradient", *vectors, *(["weight"] if vectors else [])):
        _, weight = stepped_around(rule, place)
        # A share of the change of the weight; float32 vectors are accurate to 1e-6.
        assert (weight - expected).norm() < 1e-4 * (expected - start).norm(), place


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rows", [1, 16, 200])
def test_a_singular_value_that_has_grown_is_seen(rows, schedule, dtype) -> None:
    """Test eigenvalues of the Gram matrix before the last step. Values within the image of [0, 1]
    count as bounded, but a value 2.5 times as large does not."""
    steps = coefficients(schedule, 8, dtype)
    most, (_, b, c) = largest_value(steps[:-1]), steps[-1]
    sound = torch.full((rows,), most**2)
    grown = sound.clone()
    grown[rows // 2] *= 2.5**2
    broken = sound.clone()
    broken[-1] = torch.nan
    values = torch.stack([sound, torch.zeros(rows), grown, broken])
    gram = torch.diag_embed(values).to(dtype)
    p = torch.diag_embed(b * values + c * values.square()).to(dtype)
    assert is_bounded(gram, p, steps).tolist() == [True, True, False, False]


@pytest.mark.parametrize("active", [None, True, False])
def test_only_a_step_that_is_taken_is_refused(active: bool | None) -> None:
    sound = torch.tensor([True, False])
    gate = None if active is None else torch.tensor(active)
    assert refused(gate, sound).tolist() == [0.0, 0.0 if active is False else 1.0]
    assert taken(gate, sound).tolist() == [active is not False, False]
