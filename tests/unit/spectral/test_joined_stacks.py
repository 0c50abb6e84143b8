"""Stacks with one shorter side stepped together, against each of them by itself."""

import pytest
import torch
from torch import Tensor

from spectral.rules import RULES
from spectral.rules.base import Rate, Stack, Step
from spectral.rules.muon import MuonRule
from spectral.tangent import Solver, TangentProblem

SHAPES = [(2, 40, 40), (3, 40, 72), (4, 72, 40)]
"""With a shorter side above `DIRECT_ROWS`, for which the solver takes a basis."""
RULES_OF_STACKS: list[tuple[str, dict[str, object]]] = [
    ("muon", {}),
    ("muon_sphere", {}),
    ("muon_sphere", {"retraction": "dynamic"}),
    ("spectral_sphere", {"early_exit": False}),
    ("muon", {"msign_dtype": "float16"}),
    ("spectral_sphere", {"early_exit": False, "msign_dtype": "float16"}),
]
OF_STACKS = pytest.mark.parametrize(("name", "options"), RULES_OF_STACKS)


def drawn(
    rule: MuonRule,
    rates: tuple[Rate, ...] = (0.1, 0.1, 0.1),
    decay: float = 0.0,
    active: Tensor | None = None,
) -> list[Stack]:
    """Stacks in float64, so that only the order of sums tells ways to compute a step apart."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape, lr in zip(SHAPES, rates, strict=True):
        weight, grad = torch.randn(2, *shape, generator=generator, dtype=torch.float64).unbind()
        found.append(Stack(weight, grad, rule.init_state(weight), Step(lr, decay, active)))
    return found


def check_equal(
    rule: MuonRule, rates: tuple[Rate, ...], decay: float, active: Tensor | None
) -> None:
    together_, alone = (drawn(rule, rates, decay, active) for _ in range(2))
    reports = rule.update(together_)
    # Products in float16 round the same whatever stands beside a matrix, up to the last place.
    close = {"rtol": 1e-7, "atol": 1e-7 if rule.msign_dtype is None else 2e-3}
    bound = 1e-10 if rule.msign_dtype is None else 2e-3
    for mine, other, report in zip(together_, alone, reports, strict=True):
        (expected,) = rule.update([other])
        torch.testing.assert_close(mine.weight, other.weight, rtol=0, atol=bound)
        torch.testing.assert_close(mine.state, other.state, **close)
        assert report.keys() == expected.keys()
        for key in report.keys() - {"residual", "slope"}:
            torch.testing.assert_close(report[key], expected[key], **close)


@OF_STACKS
def test_a_joined_step_equals_that_of_each_stack(name: str, options: dict[str, object]) -> None:
    rule = RULES[name](**options)
    assert isinstance(rule, MuonRule)
    decay = 0.0 if "retraction" in options else 0.3
    check_equal(rule, (0.1, 0.1, 0.1), decay, torch.tensor(True))
    tensor = torch.tensor(0.1, dtype=torch.float64)
    check_equal(rule, (tensor,) * 3, decay, None)
    check_equal(rule, (0.1, 0.1, 0.1), decay, torch.tensor(False))
    check_equal(rule, (0.1, tensor, torch.full((4,), 0.2, dtype=torch.float64)), decay, None)


@OF_STACKS
def test_one_unsound_unit_is_refused_alone(name: str, options: dict[str, object]) -> None:
    rule = RULES[name](**options)
    assert isinstance(rule, MuonRule)
    stacks, before = drawn(rule), drawn(rule)
    stacks[1].grad[1, 3, 5] = torch.nan
    refused = torch.cat([r["refused"] for r in rule.update(stacks)])
    assert refused.nonzero().flatten().tolist() == [3]
    moved = [(a.weight != b.weight).flatten(1).any(1) for a, b in zip(stacks, before, strict=True)]
    if rule.reads_weight:  # its retraction needs no gradient
        assert stacks[1].weight.isfinite().all()
    else:
        assert torch.cat(moved).logical_not().nonzero().flatten().tolist() == [3]


def test_joined_solves_refuse_other_shorter_sides() -> None:
    problems = [
        TangentProblem(torch.ones(1, rows, 40), torch.ones(1, rows), torch.ones(1, 40))
        for rows in (40, 30)
    ]
    with pytest.raises(ValueError, match="equal shorter sides"):
        Solver().solve(problems)
