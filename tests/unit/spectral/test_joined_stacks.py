"""Stacks with one shorter side stepped together, against each of them by itself."""

import pytest
import torch
from torch import Tensor

from spectral.joined_stacks import apart, images, numbers, preimages, together
from spectral.polar import normalized, polars_of
from spectral.power_iteration import top_pairs
from spectral.rules import RULES
from spectral.rules.base import Rate, Stack, Step
from spectral.rules.muon import MuonRule
from spectral.schedules import coefficients
from spectral.tangent import Solver, TangentProblem

SHAPES = [(2, 24, 24), (3, 24, 40), (4, 40, 24)]
RULES_OF_STACKS: list[tuple[str, dict[str, object]]] = [
    ("muon", {}),
    ("muon_sphere", {}),
    ("muon_sphere", {"retraction": "dynamic"}),
    ("spectral_sphere", {"early_exit": False}),
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
    for mine, other, report in zip(together_, alone, reports, strict=True):
        (expected,) = rule.update([other])
        torch.testing.assert_close(mine.weight, other.weight, rtol=0, atol=1e-10)
        torch.testing.assert_close(mine.state, other.state, rtol=1e-7, atol=1e-7)
        assert report.keys() == expected.keys()
        for key in report.keys() - {"residual", "slope"}:
            torch.testing.assert_close(report[key], expected[key], rtol=1e-7, atol=1e-7)


@OF_STACKS
def test_a_joined_step_equals_that_of_each_stack(name: str, options: dict[str, object]) -> None:
    rule = RULES[name](**options)
    assert isinstance(rule, MuonRule)
    decay = 0.0 if "retraction" in options else 0.3
    check_equal(rule, (0.1, 0.1, 0.1), decay, torch.tensor(True))
    tensor = torch.tensor(0.1, dtype=torch.float64)
    check_equal(rule, (tensor,) * 3, decay, None)
    check_equal(rule, (0.1, tensor, torch.full((4,), 0.2, dtype=torch.float64)), decay, None)


@OF_STACKS
def test_an_inactive_joined_step_changes_nothing(name: str, options: dict[str, object]) -> None:
    rule = RULES[name](**options)
    assert isinstance(rule, MuonRule)
    stacks, before = (drawn(rule, active=torch.tensor(False)) for _ in range(2))
    for stack in stacks:
        stack.grad.fill_(torch.nan)
    reports = rule.update(stacks)
    for stack, old, report in zip(stacks, before, reports, strict=True):
        assert torch.equal(stack.weight, old.weight) and not report["refused"].any()
        assert all(torch.equal(stack.state[key], old.state[key]) for key in old.state)


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


def test_top_pairs_of_stacks_equal_an_svd() -> None:
    generator = torch.Generator().manual_seed(0)
    stacks = [torch.randn(n, 12, c, generator=generator) for n, c in ((2, 12), (1, 30))]
    stacks[0][1] *= 1e30  # the squares of its entries are no float32
    sigma, short, long, _ = top_pairs(stacks, torch.zeros(3, 12), steps=48)
    for w, value, u, v in zip(
        [*stacks[0], *stacks[1]], sigma, short, [*long[0], *long[1]], strict=True
    ):
        left, values, right = torch.linalg.svd(w.double())
        torch.testing.assert_close(value.double(), values[0], rtol=2e-6, atol=0)
        assert float((u.double() @ left[:, 0]) * (v.double() @ right[0])) > 0.999


def test_products_of_stacks() -> None:
    stacks = [torch.randn(2, 3, 4), torch.randn(1, 3, 5)]
    x = torch.randn(3, 2, 3)
    found = images(x, stacks)
    torch.testing.assert_close(found[1], x[2:] @ stacks[1])
    back = preimages(found, stacks)
    torch.testing.assert_close(
        back, together([y @ w.mT for y, w in zip(found, stacks, strict=True)])
    )
    assert [len(part) for part in apart(back, stacks)] == [2, 1]
    assert numbers([2.0, 3.0], stacks).tolist() == [2, 2, 3]


def tangent_problems() -> list[TangentProblem]:
    """Stacks of momenta with a shorter side above `DIRECT_ROWS`, which takes a basis."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape in ((2, 40, 40), (3, 40, 72), (1, 64, 40)):
        m = torch.randn(shape, generator=generator, dtype=torch.float64)
        m = m / torch.linalg.matrix_norm(m, keepdim=True)
        u, v = (torch.randn(3, n, generator=generator, dtype=torch.float64) for n in shape[1:])
        u, v = (x[: shape[0]] / x[: shape[0]].norm(dim=1, keepdim=True) for x in (u, v))
        found.append(TangentProblem(m + 0.5 * u[:, :, None] * v[:, None], u, v))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("evaluations", [1, 3])
@pytest.mark.parametrize("overwrite", [False, True])
def test_joined_solves_equal_that_of_each_stack(
    dtype: torch.dtype, evaluations: int, overwrite: bool
) -> None:
    """Products in float16 round the same whatever stands beside a matrix."""
    options = {"dtype": dtype, "max_evaluations": evaluations, "overwrite": overwrite}
    if dtype == torch.float64:
        options |= {"tolerance": 1e-9, "shifts": 3}  # so that later evaluations are needed
    problems = tangent_problems()
    solver = Solver(**options)  # type: ignore[arg-type]
    joined = solver.solve(problems)
    for problem, found, fresh in zip(problems, joined, tangent_problems(), strict=True):
        assert (found.direction.data_ptr() == problem.m.data_ptr()) is overwrite
        (alone,) = solver.solve([fresh])
        for name, mine, other in zip(found._fields, found, alone, strict=True):
            assert (mine is None) == (other is None), name
            if mine is not None:
                atol = 1e-9 if dtype == torch.float64 else 2e-3
                torch.testing.assert_close(mine, other, rtol=1e-6, atol=atol)


def test_a_solve_does_not_depend_on_what_it_is_joined_with() -> None:
    """Neither a momentum that is NaN nor other matrices change the solutions beside them."""
    problems, others = tangent_problems(), tangent_problems()
    others[0].m[0] = torch.nan
    others[1] = TangentProblem(*(x[:2].neg() for x in others[1]))
    solver = Solver(tolerance=1e-9, max_evaluations=3, shifts=3)
    clean, beside = solver.solve([problems[0], problems[2]]), solver.solve(others)
    assert not beside[0].bounded[0]
    for mine, other in ((clean[0], beside[0]), (clean[1], beside[2])):
        first = len(mine.multiplier) - 1
        for name in ("multiplier", "direction", "residual"):
            a, b = getattr(mine, name)[first:], getattr(other, name)[first:]
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_joined_solves_refuse_other_shorter_sides() -> None:
    problems = tangent_problems()
    m, u, v = problems[1]
    problems[1] = TangentProblem(m[:, :30], u[:, :30], v)
    with pytest.raises(ValueError, match=r"equal shorter sides, got \[40, 30, 40\]"):
        Solver().solve(problems)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_polar_factors_of_stacks_equal_that_of_each(dtype: torch.dtype) -> None:
    """In both forms, of wide and tall stacks, and of shorter sides that agree or not."""
    steps = coefficients("polar_express", 5, dtype)
    shapes = [(2, 16, 64), (3, 100, 16), (1, 16, 20), (2, 8, 40), (1, 16, 64)]
    matrices = [normalized(torch.randn(shape)) for shape in shapes]
    joined = polars_of(list(matrices), steps, dtype)
    for x, (direction, bounded) in zip(matrices, joined, strict=True):
        ((alone, expected),) = polars_of([x], steps, dtype)
        assert torch.equal(bounded, expected) and bounded.all()
        # Products of a batch and of a single matrix differ by rounding.
        atol = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(direction, alone, rtol=0, atol=atol)
