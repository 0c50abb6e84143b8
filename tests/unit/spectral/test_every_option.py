"""Every option and every state entry of every rule affects results.

An unused option, or an entry that is not loaded, would not affect any result.
"""

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from spectral import SpectralOptimizer
from spectral.rules import RULES, Rule
from spectral.rules.base import take_step
from tests.other_values import another
from tests.step_trace import without_eigensolvers

SHAPE = (3, 6, 10)
STEPS = 3
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("muon_sphere", "retraction_rate"): {"retraction": "dynamic"},
    ("spectral_sphere", "retraction_rate"): {"retraction": "dynamic"},
    ("spectral_sphere", "max_evaluations"): {"tolerance": 1e-12},  # never reached by a solve
    ("muon_plus_plus", "tolerance"): {"algorithm": "dual"},
}
"""Maps options that only have an effect together with other options to these other options."""
OTHER: dict[str, Any] = {
    "radius": "align_adam_rms",
    "msign_dtype": "bfloat16",
    "tolerance": 1e-12,
    "max_evaluations": 1,
    "krylov_steps": 1,
    "steps": 3,
    "schedule": "simple",
}
"""Values to try for options whose types have no obvious other value."""


def stepped(rule: Rule) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the weights, the state and the reports after some steps."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(SHAPE, generator=generator) + 1  # rows are correlated
    state, report = rule.init_state(weight), {}
    for _ in range(STEPS):
        grad = torch.randn(SHAPE, generator=generator)
        report = take_step(rule, weight, grad, state, lr=0.05, weight_decay=0.1)
    return [weight, *state.values()], report


ELSEWHERE = {
    ("spectral_sphere", "early_exit"),  # with an exact first root, there is nothing to save
    ("muon_plus_plus", "max_evaluations"),
    ("muon_plus_plus", "correlation_rescale"),
    ("muon_plus_plus", "correlation_threshold"),
}
"""Options that need special gradients. test_tangent.py and test_muon_plus_plus.py test them."""
WALK = [
    (name, field.name)
    for name, kind in RULES.items()
    for field in fields(kind)
    if (name, field.name) not in ELSEWHERE
]


@pytest.mark.parametrize(("name", "option"), WALK)
def test_every_option_of_a_rule_changes_its_steps(name: str, option: str) -> None:
    kind = RULES[name]
    base = kind(**BESIDE.get((name, option), {}))
    other = OTHER.get(option) or another(kind, option, getattr(base, option))
    changed = replace(base, **{option: other})
    with without_eigensolvers():  # these need no steps
        (one, before), (other, after) = stepped(base), stepped(changed)
    same = all(map(torch.equal, one, other))
    assert not same or any(not torch.equal(before[k], after[k]) for k in before.keys() & after)


def optimizer_of(name: str) -> SpectralOptimizer:
    """Return an optimizer for a wide matrix, whose step reads u, and a tall matrix, whose step
    reads v."""
    generator = torch.Generator().manual_seed(0)
    weights = [Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 10), (10, 6))]
    options: dict[str, Any] = {"lr": 0.05}
    if name == "muon_plus_plus":
        options |= {"algorithm": "project", "correlation_rescale": True}
    return SpectralOptimizer(weights, rule=name, **options)


def trained(optimizer: SpectralOptimizer, first: int) -> list[Tensor]:
    """Take two steps with gradients that depend on `first`, and return the weights and the
    state."""
    generator = torch.Generator().manual_seed(first)
    weights = optimizer.param_groups[0]["params"]
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    state = [value for weight in weights for value in optimizer.state[weight].values()]
    return [x.detach().clone() for x in (*weights, *state)]


UNUSUAL = ("correlation",)
"""State entries that only unusual weights need."""
ENTRIES = [
    (name, entry)
    for name, kind in RULES.items()
    for entry in kind().init_state(torch.ones(1, 2, 2))
    if entry not in UNUSUAL
]


@pytest.mark.parametrize(("name", "entry"), ENTRIES)
def test_every_entry_of_a_state_that_is_loaded_matters(name: str, entry: str) -> None:
    """If a value in the checkpoint changes, the resumed run changes."""
    optimizer = optimizer_of(name)
    trained(optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]

    def resumed(state: dict[str, Any]) -> list[Tensor]:
        other = optimizer_of(name)
        other.load_state_dict(copy.deepcopy(state))
        for parameter, weight in zip(other.param_groups[0]["params"], weights, strict=True):
            parameter.data.copy_(weight)
        return trained(other, 2)

    changed = copy.deepcopy(saved)
    for state in changed["state"].values():
        state[entry].copy_(state[entry].flatten().flip(0).view_as(state[entry]) * 0.7 + 0.1)
    with without_eigensolvers():
        plain, other, again = resumed(saved), resumed(changed), resumed(saved)
    assert all(map(torch.equal, plain, again))
    assert not all(map(torch.equal, plain, other))
