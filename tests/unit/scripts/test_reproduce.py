"""The papers' experiments run at a small size; wrong numbers and wrong variants of their methods
fail.

An experiment that a wrong method passes is worthless. A variant replaces one function of the method
with a wrong one while the experiment runs at its small size, which checks only statements of the
papers and theory, not recorded numbers.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
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
def test_properties_hold_at_a_small_size(name: str, tmp_path: Path) -> None:
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
    assert "runs that diverge (the loss is" in printed and "training can diverge" in printed
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
def test_published_numbers_hold(name: str, tmp_path: Path) -> None:
    result = perform(name, tmp_path, seed=None, small=False, suffix=".svg")
    assert not [check for check in result.checks if not check.passed]


# --- wrong variants -----------------------------------------------------------------------------

Function = Callable[..., Any]
Wrong = Callable[[Any], Any]
"""A function from the right value to a wrong one."""
Owner = ModuleType | type


def root_of(measure: Function) -> Function:
    """Return the square root of a measure of `[..., rows, cols]`, a wrong power."""
    return lambda w: measure(w).sqrt()


def swapped(measure: Function) -> Wrong:
    """Use `measure` instead of the right measure."""
    return lambda right: measure


def direction(change: Callable[[Tensor, Tensor], Tensor]) -> Wrong:
    """Use the direction `change(gradient, direction)`, both `[batch, rows, cols]`."""

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
    """Give Euclidean layers the scale of spectral layers, n / |A|_F^2."""
    return lambda self, layer, a: a.shape[0] / float(a.square().sum())


def one_step_ahead(right: Function) -> Function:
    """Compute the closed-form gradient one step too late."""
    return lambda task, times: right(task, [t + 1 for t in times])


def last_too_large(level: odd_polynomial.Level) -> odd_polynomial.Level:
    """Return the polynomial with a last coefficient that is 1% too large."""
    ((*first, last),) = odd_polynomial.stages(level)
    return (*first, 1.01 * last)


def composite(stages: tuple[odd_polynomial.Stage, ...]) -> Wrong:
    """Use other stages for the over-flattening composite."""
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
        return found._replace(
            multiplier=torch.zeros_like(found.multiplier), direction=msign(m, steps=steps)
        )

    return wrong


FLATTENING = SCHEDULES["polar_express_upstream"].coefficients
BY_EXPERIMENT: dict[str, dict[tuple[Owner, str], dict[str, Wrong]]] = {
    "pi_bound": {
        (random_features, "stable_rank"): {
            "the stable rank is a power too low": root_of,
            "the nuclear rank in place of the stable rank": swapped(measures.nuclear_rank),
        }
    },
    "relu_features": {(SpectralDescentRule, "direction"): DESCENT},
    "gated_features": {(SpectralDescentRule, "direction"): DESCENT},
    "rank_growth": {
        (random_features, "gradients"): {"one step too many": one_step_ahead},
        (random_features, "nuclear_rank"): {
            "the stable rank in place of the nuclear rank": swapped(measures.stable_rank)
        },
    },
    "sparse_regression": {(SpectralDescentRule, "direction"): DESCENT},
    "gated_batches": {
        (networks, "stable_rank"): {"the stable rank is a power too low": root_of},
        (networks, "activate"): {
            "gate and up are exchanged": lambda right: (
                lambda kind, x: right(kind, x.roll(x.shape[-1] // 2, -1))
            )
        },
    },
    "gated_regression": {
        (SpectralDescentRule, "direction"): DESCENT,
        (networks.BlockDescent, "scale"): {
            "Euclidean layers have the scale of spectral ones": block_scale
        },
    },
    "deep_linear": {
        (pc_layers, "Preconditioner"): {
            "the last coefficient is one percent too large": lambda right: (
                lambda level: right(level=last_too_large(level))
            ),
            "the norm is not recovered": lambda right: partial(right, norm_recovery=False),
        }
    },
    "over_flattening": {
        (odd_polynomial, "COMPOSITES"): {
            "level 4 in place of the composite": composite((odd_polynomial.PRESETS[4],)),
            "a step too few": composite(FLATTENING[:-1]),
        }
    },
    "muon_gap": {
        (muon_plus_plus, "project_"): {
            "u and v are exchanged": lambda right: lambda m, u, v: right(m, v, u)
        },
        (MuonPlusPlusRule, "rescale"): {"the weight is not rescaled": no_rescaling},
    },
    "correlated_weights": {
        (weight_norms, "correlated"): {
            "rho in place of its root": lambda right: (
                lambda phi, rho, z: rho * z + math.sqrt(1 - rho) * phi
            )
        },
        (weight_norms, "correlation"): {
            "the estimate keeps the diagonal": swapped(biased_correlation)
        },
    },
    "solver_curve": {
        (solver_curve, "solve_multiplier"): {
            "no multiplier": no_multiplier,
            "the multiplier has the other sign": lambda right: (
                lambda m, u, v, **options: right(m, -u, v, **options)
            ),
        }
    },
}
"""Replacements of attributes, at least two per experiment."""

WRONG_VARIANTS = [
    pytest.param(experiment, owner, name, wrong, id=f"{experiment}: {what}")
    for experiment, places in BY_EXPERIMENT.items()
    for (owner, name), wrongs in places.items()
    for what, wrong in wrongs.items()
]


def run_small(name: str) -> Outcome:
    """Run an experiment at its small size."""
    experiment = EXPERIMENTS[name]
    return experiment.run(Draws(experiment.seed), **experiment.settings(small=True))


passed_checks = cache(
    lambda name: frozenset(check.name for check in run_small(name).checks if check.passed)
)
"""Names of the checks of an experiment that the right method passes."""


@pytest.mark.slow
@pytest.mark.parametrize(("experiment", "owner", "name", "wrong"), WRONG_VARIANTS)
def test_a_wrong_variant_fails_a_check(experiment, owner, name, wrong, monkeypatch) -> None:
    passed = passed_checks(experiment)
    monkeypatch.setattr(owner, name, wrong(vars(owner)[name]))
    assert [
        check for check in run_small(experiment).checks if check.name in passed and not check.passed
    ]


def test_every_experiment_has_two_wrong_variants() -> None:
    tried = Counter(variant.values[0] for variant in WRONG_VARIANTS)
    assert tried.keys() == EXPERIMENTS.keys() and min(tried.values()) >= 2
