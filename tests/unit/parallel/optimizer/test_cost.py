"""The cost of a unit is what a step of its rule executes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from parallel.optimizer.cost import (
    EARLY_EXIT_EVALUATIONS,
    ELEMENTWISE_FLOPS,
    FIXED_EVALUATIONS,
    msign_cost,
    precondition_cost,
    unit_cost,
)
from spectral.pc_state import Preconditioner
from spectral.polar import msign, prefers_gram
from spectral.rules import RULES
from spectral.rules.base import Rule
from spectral.schedules import coefficients

STEPS = [
    ("muon", {"msign_dtype": "bfloat16"}),
    ("muon", {"steps": 5, "schedule": "simple"}),
    ("muon_sphere", {}),
    ("muon_sphere", {"power_iteration_steps": 3}),
    ("spectral_sphere", {"early_exit": False}),
    ("spectral_sphere", {"early_exit": False, "max_evaluations": 5}),
    ("muon_plus_plus", {"algorithm": "project"}),
    ("muon_plus_plus", {"algorithm": "project_rescale"}),
    ("muon_plus_plus", {"algorithm": "dual"}),
    ("spectral_descent", {}),
]


def executed(rule, shape):
    """FLOPs of the matrix products of one step."""
    weight = torch.randn(1, *shape)
    state = rule.init_state(weight)
    with FlopCounterMode(display=False) as counter:
        rule.step(weight, torch.randn(1, *shape), state, lr=0.1)
    return counter.get_total_flops()


def products(rule, shape):
    """FLOPs of the matrix products that the cost counts."""
    return unit_cost(shape, rule) - ELEMENTWISE_FLOPS * shape[0] * shape[1]


@pytest.mark.parametrize("shape", [(128, 512), (300, 130)])
@pytest.mark.parametrize(("name", "settings"), STEPS)
def test_a_step_costs_what_it_executes(name, settings, shape):
    rule = RULES[name](**settings)
    # What is left out is the small dense algebra of the Krylov spaces.
    assert products(rule, shape) == pytest.approx(executed(rule, shape), rel=0.025)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("shape", [(16, 16), (16, 20), (64, 16)])
def test_msign_costs_exactly_what_it_executes(shape, steps, dtype):
    with FlopCounterMode(display=False) as counter:
        msign(torch.randn(shape), steps=steps, dtype=dtype)
    assert msign_cost(*sorted(shape), steps=steps, dtype=dtype) == counter.get_total_flops()


def test_both_forms_of_msign_are_covered():
    steps = coefficients("polar_express", 8)
    forms = {prefers_gram(16, n, steps, torch.float32) for n in (16, 64)}
    assert forms == {True, False}


def test_an_early_exit_costs_its_expected_evaluations():
    fixed, early = (RULES["spectral_sphere"](early_exit=exit) for exit in (False, True))
    shape = (256, 1024)
    msign_flops = msign_cost(256, 1024, steps=8, dtype=torch.float32)
    saved = unit_cost(shape, fixed) - unit_cost(shape, early)
    assert saved == pytest.approx((FIXED_EVALUATIONS - EARLY_EXIT_EVALUATIONS) * msign_flops)
    # The default is priced as on a GPU, where it does not exit early.
    assert unit_cost(shape, RULES["spectral_sphere"]()) == unit_cost(shape, fixed)


def test_elementwise_rules_cost_their_elements():
    adamw = RULES["adamw"]()
    assert unit_cost((300, 20), adamw) == 2 * unit_cost((3000,), adamw)
    assert unit_cost((600, 400), adamw) < 0.01 * unit_cost((600, 400), RULES["muon"]())
    # A vector under a rule that also steps vectors.
    assert unit_cost((50,), RULES["spectral_descent"]()) == unit_cost((50,), adamw)


@pytest.mark.parametrize("name", RULES)
def test_the_orientation_of_a_matrix_does_not_matter(name):
    assert unit_cost((96, 40), RULES[name]()) == unit_cost((40, 96), RULES[name]())


def test_products_can_be_priced_by_a_table():
    """With a price of one for every product the cost is the number of products."""
    rule = RULES["muon"](steps=5)
    price = unit_cost((32, 32), rule, product=lambda rows, inner, cols: 1.0)
    assert price - ELEMENTWISE_FLOPS * 32 * 32 == 3 * 5


def test_an_unknown_rule_is_refused():
    class Novel(Rule):
        whole_matrix = True

        def init_state(self, weight):
            return {}

        def update(self, weight, momentum, state, *, lr, weight_decay, active):
            return {}

    with pytest.raises(ValueError, match="MATRIX_COSTS, got Novel"):
        unit_cost((4, 4), Novel())


@pytest.mark.parametrize("shape", [(40, 40), (200, 64), (64, 200)])
@pytest.mark.parametrize("level", [1, 4, "over_flattening"])
def test_preconditioning_is_counted_as_it_runs(shape, level):
    preconditioner = Preconditioner(level=level, steps=4)
    weight, gradient = torch.randn(2, 1, *shape)
    u, v = preconditioner.cold_pair(weight)
    gamma = torch.ones(1)
    with FlopCounterMode(display=False) as counter:
        preconditioner.effective(weight, u, v, gamma)
        preconditioner.vjp(gradient, weight, u, v, gamma)
        preconditioner.refresh_(weight, u, v)
    # What is left out are products of vectors and of the small Krylov basis.
    assert precondition_cost(shape, preconditioner) == pytest.approx(
        counter.get_total_flops(), rel=0.1
    )
