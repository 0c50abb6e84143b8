"""The experiments of the papers run at a small size. Wrong numbers and wrong variants of the
methods fail.

An experiment that passes with a wrong method is worthless. Each variant replaces one function of
the method with a wrong function. The experiment runs at its small size, at which it only checks
statements from the papers and theory, not recorded numbers.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.experiments import networks, pc_layers, random_features, solver_curve, weight_norms
from scripts.experiments.experiment import Draws, Outcome
from scripts.experiments.runner import EXPERIMENTS, bounds, perform
from scripts.reproduce import main
from spectral import measures, msign, odd_polynomial
from spectral.polar import SCHEDULES, Polar
from spectral.rules import MuonPlusPlusRule, SpectralDescentRule, muon_plus_plus


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_properties_hold_at_a_small_size(name: str, tmp_path) -> None:
    result = perform(name, tmp_path, seed=None, small=True, suffix=".svg")
    assert not [check for check in result.checks if not check.passed]
    content = json.loads((tmp_path / f"{name}.json").read_text())
    assert content["passed"] and not content["published_setting"]
    assert content["settings"]["seed"] == EXPERIMENTS[name].seed
    assert {"python", "torch"} <= content["versions"].keys()
    assert len(content["checks"]) == len(result.checks) >= 3
    for check, stored in zip(result.checks, content["checks"], strict=True):
        assert stored["measured"] == check.measured and stored["source"]
    figure = (tmp_path / f"{name}.svg").read_text()
    for panel in run_small(name).panels:
        assert panel.title in figure


@pytest.mark.parametrize(
    ("number", "inside", "outside"),
    [("4.22e-3", 4.229e-3, 4.231e-3), ("27.47", 27.461, 27.459), ("50", 49.1, 48.9)],
)
def test_a_printed_number_is_known_to_its_last_digit(number, inside, outside) -> None:
    low, high = bounds(number)
    assert low <= inside <= high and not low <= outside <= high


def test_a_wrong_number_fails(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(random_features, "BOUND", 3.0)
    assert main(["pi_bound", "--small", "--output", str(tmp_path)]) == 1
    assert "FAIL" in capsys.readouterr().out
    assert not json.loads((tmp_path / "pi_bound.json").read_text())["passed"]
    (summary,) = json.loads((tmp_path / "results.json").read_text())
    wrong = [check for check in summary["checks"] if not check["passed"]]
    assert [check["high"] for check in wrong] == [3.0] and wrong[0]["measured"] > 3.0
    assert "| FAIL |" in (tmp_path / "table.md").read_text()


@pytest.mark.slow
def test_an_experiment_that_diverges_fails_in_a_row(tmp_path, capsys) -> None:
    names = ["gated_regression", "pi_bound"]
    (tmp_path / "gated_regression.svg").touch()  # of an earlier run
    assert main([*names, "--small", "--seed", "1", "--output", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "gated_regression: 1 of 1 FAILED" in printed and "pi_bound: passed" in printed
    assert "diverged runs (the loss must be finite" in printed and "training may diverge" in printed
    assert not json.loads((tmp_path / "gated_regression.json").read_text())["passed"]
    assert [path.name for path in tmp_path.glob("*.svg")] == ["pi_bound.svg"]


@pytest.mark.slow
def test_a_wrong_published_number_fails_at_the_published_size(tmp_path, monkeypatch) -> None:
    # Shapes without published numbers replace the published shapes.
    shapes = ((16, 8, 32), (20, 10, 40), (32, 16, 64), (40, 20, 80), (64, 32, 128))
    monkeypatch.setattr(random_features.pi_bound, "__kwdefaults__", {"shapes": shapes})
    result = perform("pi_bound", tmp_path, seed=None, small=False, suffix=".svg")
    assert {check.series for check in result.checks if not check.passed} == {"stable_rank"}
    # Published numbers do not apply to another seed.
    other = perform("pi_bound", tmp_path, seed=5, small=False, suffix=".svg")
    assert not [check for check in other.checks if check.source == "recorded"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_published_numbers_hold(name: str, tmp_path) -> None:
    result = perform(name, tmp_path, seed=None, small=False, suffix=".svg")
    assert not [check for check in result.checks if not check.passed]


# --- wrong variants -----------------------------------------------------------------------------

Function = Callable[..., Any]
Wrong = Callable[[Any], Any]
"""A function that maps the right value to a wrong value."""
Owner = ModuleType | type


def root_of(measure: Function) -> Function:
    """Return the square root of a measure of `[..., rows, cols]`, which is a wrong power."""
    return lambda w: measure(w).sqrt()


def swapped(measure: Function) -> Wrong:
    """Replace the right measure with `measure`."""
    return lambda right: measure


def direction(change: Callable[[Tensor, Tensor], Tensor]) -> Wrong:
    """Replace the direction with `change(gradient, direction)`. Both arguments are `[batch, rows,
    cols]`."""

    def replaced(right: Function) -> Function:
        def wrong(self: SpectralDescentRule, grad: Tensor) -> Polar:
            found: Polar = right(self, grad)
            return found._replace(direction=change(grad, found.direction))

        return wrong

    return replaced


DESCENT: dict[str, Wrong] = {
    "the gradient is not orthogonalised": direction(
        lambda grad, polar: grad / torch.linalg.matrix_norm(grad)[:, None, None]
    ),
    "the polar factor is halved": direction(lambda grad, polar: polar / 2),
}


def block_scale(right: Function) -> Function:
    """Use the scale of spectral layers, n / |A|_F^2, for Euclidean layers."""
    return lambda self, layer, a: a.shape[0] / float(a.square().sum())


def one_step_ahead(right: Function) -> Function:
    """Compute the closed-form gradient one step too late."""
    return lambda task, times: right(task, [t + 1 for t in times])


def last_too_large(level: odd_polynomial.Level) -> odd_polynomial.Level:
    """Return the polynomial with a last coefficient that is 1% too large."""
    ((*first, last),) = odd_polynomial.stages(level)
    return (*first, 1.01 * last)


def composite(stages: tuple[odd_polynomial.Stage, ...]) -> Wrong:
    """Use `stages` for the over-flattening composite."""
    return lambda right: {**right, "over_flattening": stages}


def no_rescaling(right: Function) -> Function:
    """Use algorithm 1 instead of algorithm 2."""
    return lambda self, weight, sigma, state, active: {"norm": sigma}


def biased_correlation(w: Tensor) -> Tensor:
    """Compute mean^2 / mean square, without the correction for the diagonal."""
    return w.mean((-2, -1)).square() / w.square().mean((-2, -1))


def no_multiplier(right: Function) -> Function:
    """Use msign(M), which is not tangent."""

    def wrong(m: Tensor, u: Tensor, v: Tensor, **options: Any) -> Any:
        found = right(m, u, v, **options)
        steps = options.get("steps", 8)
        zero = torch.zeros_like(found.multiplier)
        return found._replace(multiplier=zero, direction=msign(m, steps=steps))

    return wrong


FLATTENING = SCHEDULES["polar_express_upstream"].coefficients
DESCENDING = ("relu_features", "gated_features", "sparse_regression", "gated_regression")
WRONG: dict[str, tuple[Owner, str, Wrong]] = {
    **{
        f"{experiment}: {what}": (SpectralDescentRule, "direction", wrong)
        for experiment in DESCENDING
        for what, wrong in DESCENT.items()
    },
    "pi_bound: the stable rank is a power too low": (random_features, "stable_rank", root_of),
    "pi_bound: the nuclear rank in place of the stable rank": (
        random_features,
        "stable_rank",
        swapped(measures.nuclear_rank),
    ),
    "rank_growth: one step too many": (random_features, "gradients", one_step_ahead),
    "rank_growth: the stable rank in place of the nuclear rank": (
        random_features,
        "nuclear_rank",
        swapped(measures.stable_rank),
    ),
    "gated_batches: the stable rank is a power too low": (networks, "stable_rank", root_of),
    "gated_batches: gate and up are exchanged": (
        networks,
        "activate",
        lambda right: lambda kind, x: right(kind, x.roll(x.shape[-1] // 2, -1)),
    ),
    "gated_regression: Euclidean layers have the scale of spectral ones": (
        networks.BlockDescent,
        "scale",
        block_scale,
    ),
    "deep_linear: the last coefficient is one percent too large": (
        pc_layers,
        "Preconditioner",
        lambda right: lambda level: right(level=last_too_large(level)),
    ),
    "deep_linear: the norm is not recovered": (
        pc_layers,
        "Preconditioner",
        lambda right: partial(right, norm_recovery=False),
    ),
    "over_flattening: level 4 in place of the composite": (
        odd_polynomial,
        "COMPOSITES",
        composite((odd_polynomial.PRESETS[4],)),
    ),
    "over_flattening: a step too few": (odd_polynomial, "COMPOSITES", composite(FLATTENING[:-1])),
    "muon_gap: u and v are exchanged": (
        muon_plus_plus,
        "project_",
        lambda right: lambda m, u, v: right(m, v, u),
    ),
    "muon_gap: the weight is not rescaled": (MuonPlusPlusRule, "rescale", no_rescaling),
    "correlated_weights: rho in place of its root": (
        weight_norms,
        "correlated",
        lambda right: lambda phi, rho, z: rho * z + math.sqrt(1 - rho) * phi,
    ),
    "correlated_weights: the estimate keeps the diagonal": (
        weight_norms,
        "correlation",
        swapped(biased_correlation),
    ),
    "solver_curve: no multiplier": (solver_curve, "solve_multiplier", no_multiplier),
    "solver_curve: the multiplier has the other sign": (
        solver_curve,
        "solve_multiplier",
        lambda right: lambda m, u, v, **options: right(m, -u, v, **options),
    ),
}
"""Wrong replacements of attributes, at least two for each experiment."""


def run_small(name: str) -> Outcome:
    """Run an experiment at its small size."""
    experiment = EXPERIMENTS[name]
    return experiment.run(Draws(experiment.seed), **experiment.settings(small=True))


@cache
def passed_checks(name: str) -> set[str]:
    """Return the names of the checks in an experiment that the right method passes."""
    return {check.name for check in run_small(name).checks if check.passed}


@pytest.mark.slow
@pytest.mark.parametrize("variant", WRONG)
def test_a_wrong_variant_fails_a_check(variant, monkeypatch) -> None:
    experiment, (owner, name, wrong) = variant.partition(":")[0], WRONG[variant]
    passed = passed_checks(experiment)
    monkeypatch.setattr(owner, name, wrong(vars(owner)[name]))
    checks = run_small(experiment).checks
    assert passed & {check.name for check in checks if not check.passed}


def test_every_experiment_has_two_wrong_variants() -> None:
    tried = Counter(variant.partition(":")[0] for variant in WRONG)
    assert tried.keys() == EXPERIMENTS.keys() and min(tried.values()) >= 2
