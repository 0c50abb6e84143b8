"""Every rule equals the `reference` at the end of its file, which computes one matrix at a time in
float64."""

import sys
from dataclasses import fields
from typing import Any

import pytest
import torch

from spectral.rules import RULES
from spectral.rules.base import take_step
from spectral.sphere import spectral_init_

SHAPES = [(12, 12), (7, 20), (20, 7), (1, 9)]
EXACT = {"steps": 16}
"""Number of steps after which msign is exact. The solvers for tangent directions stop at a
tolerance instead."""
SOLVED = {**EXACT, "tolerance": 1e-12, "max_evaluations": 60}
TOLERANCE = 1e-9
"""The tolerance covers a different order of sums in the polynomials, and iteratively computed
singular vectors."""
CASES: list[tuple[str, dict[str, Any]]] = [
    ("adamw", {}),
    ("adamw", {"beta1": 0.5, "beta2": 0.7, "epsilon": 1e-3}),
    *(
        (name, options)
        for name in ("muon", "normuon", "adamuon")
        for options in (
            {},
            {"nesterov": False, "momentum": 0.5, "scale": "spectral_kaiming"},
            {"cautious_decay": True, "scale": "spectral_mup", "scale_factor": 0.3},
            {"schedule": "simple", "steps": 5, "scale": "align_adam_rms"},
        )
    ),
    ("normuon", {"beta2": 0.5}),
    ("adamuon", {"beta2": 0.5}),
    *(
        (name, {**options, **solved})
        for name, solved in (("muon_sphere", EXACT), ("spectral_sphere", SOLVED))
        for options in (
            {},
            {"nesterov": False, "momentum": 0.5, "radius": "align_adam_rms", "radius_scaler": 0.4},
            {"retraction": "dynamic", "retraction_rate": 2.0},
            {"scale": "spectral_kaiming", "scale_factor": 0.3},
        )
    ),
    *(
        ("muon_plus_plus", {"krylov_steps": 40, **options})
        for options in (
            EXACT,
            {**EXACT, "algorithm": "project", "nesterov": True, "scale": "align_adam_rms"},
            {**EXACT, "radius_scaler": 2.0, "radius": "spectral_kaiming", "momentum": 0.3},
            {
                **{**EXACT, "algorithm": "project"},
                **{"correlation_rescale": True, "correlation_threshold": 1e-3},
            },
            {**SOLVED, "algorithm": "dual"},
        )
    ),
    ("spectral_descent", {}),
    ("spectral_descent", {"schedule": "quintic", "steps": 5}),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_rule_equals_its_reference(name, options, shape) -> None:
    """Take three steps with weight decay on a stack of three matrices with a gap below the largest
    singular value."""
    if name == "muon_plus_plus" and 1 in shape:
        pytest.skip("a vector has no direction orthogonal to its top singular pair")
    rule = RULES[name](**options)
    reference = sys.modules[type(rule).__module__].reference
    generator = torch.Generator().manual_seed(3)
    weight = spectral_init_(torch.empty(3, *shape, dtype=torch.float64), generator=generator)
    weight += 0.05  # a correlation that Muon++ detects
    state = rule.init_state(weight)
    singles = [weight[i].clone() for i in range(3)]
    states = [{key: value[i].clone() for key, value in state.items()} for i in range(3)]
    for _ in range(3):
        grad = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            for i in range(3):
                singles[i], states[i] = reference(
                    rule, singles[i], grad[i], states[i], lr=0.02, weight_decay=0.1
                )
        take_step(rule, weight, grad, state, lr=0.02, weight_decay=0.1)
        torch.testing.assert_close(weight, torch.stack(singles), rtol=TOLERANCE, atol=TOLERANCE)
        for key in states[0]:
            kept = torch.stack([own[key] for own in states])
            torch.testing.assert_close(state[key], kept.to(state[key].dtype), rtol=1e-7, atol=1e-9)


EXEMPT = {
    "muon_plus_plus": {"scale_factor", "schedule"},
    "spectral_sphere": {"schedule"},
    "muon_sphere": {"schedule"},
}
"""Options of code shared with Muon, which the test of Muon compares."""


def test_every_option_of_every_rule_is_compared() -> None:
    """Only options that affect accuracy are exempt."""
    how = {"msign_dtype", "krylov_steps", "tolerance", "max_evaluations", "early_exit"}
    for name, kind in RULES.items():
        if name == "normalized":  # the example of CONTRIBUTING, if installed
            continue
        changed = {key for case, options in CASES if case == name for key in options}
        assert {field.name for field in fields(kind)} - how <= changed | EXEMPT.get(name, set())
