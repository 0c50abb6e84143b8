"""Wrong variants of the methods, each of which must fail at least one check of its experiment.

An experiment that a wrong method passes says nothing. A variant replaces one function of the method
by a wrong one while the experiment runs at its small size, where only statements of the papers and
theory are checked, no recorded number.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.experiments import (
    correlated_weights,
    deep_linear,
    gated_batches,
    networks,
    pi_bound,
    rank_growth,
    regression,
    solver_curve,
)
from scripts.experiments.check import Check
from scripts.experiments.registry import EXPERIMENTS
from spectral import measures, msign, odd_polynomial
from spectral.polar import Polar
from spectral.rules import MuonPlusPlusRule, MuonRule, SpectralDescentRule, muon_plus_plus
from spectral.rules.base import Stack
from spectral.schedules import SCHEDULES

pytestmark = pytest.mark.slow

Function = Callable[..., Any]
Wrong = Callable[[Any], Any]
"""From what is right to what is wrong."""
Owner = ModuleType | type


# Measures of `[..., rows, cols]`.


def root_of(measure: Function) -> Function:
    """The square root of a measure: a power too low."""
    return lambda w: measure(w).sqrt()


def swapped(measure: Function) -> Wrong:
    """Take `measure` in place of the right one."""
    return lambda right: measure


def energy_over_norm(w: Tensor) -> Tensor:
    """|W|_F^2 / |W|_2, a stable rank whose norm is not squared."""
    return w.square().sum((-2, -1)) / measures.spectral_norm(w)


def participation(w: Tensor) -> Tensor:
    """|W|_F^4 / |W^T W|_F^2, another rank."""
    return w.square().sum((-2, -1)).square() / (w.mT @ w).square().sum((-2, -1))


# The polar factor of spectral descent.


def direction(change: Callable[[Tensor, Tensor], Tensor]) -> Wrong:
    """Take the direction `change(gradient, direction)`, both `[batch, rows, cols]`."""

    def replaced(right: Function) -> Function:
        def wrong(self: SpectralDescentRule, grad: Tensor) -> Polar:
            found: Polar = right(self, grad)
            return found._replace(direction=change(grad, found.direction))

        return wrong

    return replaced


def over_root_of_nuclear_norm(grad: Tensor, polar: Tensor) -> Tensor:
    """A direction whose step is the polar factor, not |G|_* times it."""
    return polar / (grad * polar).sum((-2, -1)).abs().sqrt()[:, None, None]


DESCENT: dict[str, Wrong] = {
    "the gradient is not orthogonalised": direction(
        lambda grad, polar: grad / torch.linalg.matrix_norm(grad)[:, None, None]
    ),
    "the nuclear norm is left out": direction(over_root_of_nuclear_norm),
    "the polar factor is halved": direction(lambda grad, polar: polar / 2),
}
DESCENT_OF_SQUARES = DESCENT | {
    "the polar factor is transposed": direction(lambda grad, polar: polar.mT.contiguous()),
    "msign takes three steps": direction(lambda grad, polar: msign(grad, steps=3)),
}
"""What on other matrices would change the shape, or diverge."""


def block_scale(right: Function) -> Function:
    """Euclidean layers with the scale of spectral ones, n / |A|_F^2."""
    return lambda self, layer, a: a.shape[0] / float(a.square().sum())


# Gradients in closed form.


def one_step_ahead(right: Function) -> Function:
    """The gradient one step too late."""
    return lambda task, times: right(task, [t + 1 for t in times])


def half_rate(right: Function) -> Function:
    """Gradient descent with half of the step size."""

    def wrong(task: regression.Regression, times: tuple[int, ...]) -> Tensor:
        n = task.a.shape[1]
        values, vectors = torch.linalg.eigh(task.a @ task.a.mT / n)
        powers = torch.stack([(1 - values / values[-1] / 2) ** t for t in times])
        return -(task.y @ task.a.mT / n @ vectors * powers[:, None]) @ vectors.mT

    return wrong


# PC layers.


def relevelled(change: Callable[[odd_polynomial.Level], odd_polynomial.Level]) -> Wrong:
    """Take the polynomial `change(level)` in place of that of `level`."""
    return lambda right: lambda w, u, v, gamma, level: right(w, u, v, gamma, change(level))


def coefficients(level: odd_polynomial.Level) -> tuple[float, ...]:
    """The coefficients of a preset."""
    (stage,) = odd_polynomial.stages(level)
    return stage


def second_too_large(level: odd_polynomial.Level) -> odd_polynomial.Level:
    """The polynomial whose second coefficient is one percent too large."""
    first, *rest = coefficients(level)
    return (first, *(1.01 * each for each in rest[:1]), *rest[1:])


def last_power_raised(level: odd_polynomial.Level) -> odd_polynomial.Level:
    """The polynomial whose last power is two too high."""
    *first, last = coefficients(level)
    return (*first, 0.0, last)


def negated(level: odd_polynomial.Level) -> odd_polynomial.Level:
    """The polynomial with the other sign."""
    return tuple(-each for each in coefficients(level))


def no_recovery(right: Function) -> Function:
    """PC(W) = g(W / s)."""
    return partial(right, norm_recovery=False)


def differentiated_recovery(right: Function) -> Function:
    """PC(W) with a gradient through the factor s that recovers the norm."""

    def wrong(w: Tensor, u: Tensor, v: Tensor, gamma: float, level: odd_polynomial.Level) -> Tensor:
        s = u[:, None] @ w @ v[:, :, None]
        found: Tensor = s * right(w, u, v, gamma, level, norm_recovery=False)
        return found

    return wrong


def by_frobenius_norm(right: Function) -> Function:
    """PC(W) = f g(W / f), f the Frobenius norm."""

    def wrong(w: Tensor, u: Tensor, v: Tensor, gamma: float, level: odd_polynomial.Level) -> Tensor:
        norm = torch.linalg.matrix_norm(w)[:, None, None]
        found: Tensor = norm.detach() * right(w / norm, u, v, gamma, level, spectral_norm="none")
        return found

    return wrong


def composite(stages: tuple[odd_polynomial.Stage, ...]) -> Wrong:
    """Take other stages for the over-flattening composite."""
    return lambda right: {**right, "over_flattening": stages}


FLATTENING = SCHEDULES["polar_express_upstream"].coefficients
QUINTIC = (3.4445, -4.7750, 2.0315)
"""The coefficients of Muon's first implementation, which oscillate around 1."""


# Muon++.


def left_only(right: Function) -> Function:
    """(I - u u^T) M: the right singular vector is forgotten."""
    return lambda m, u, v: m.baddbmm_(u[:, :, None], u[:, None, :] @ m, alpha=-1)


def scaled_step(factor: float) -> Wrong:
    """A step of `factor` times the size."""

    def wrong(right: Function) -> Function:
        def apply(
            self: MuonRule, stacks: Sequence[Stack], polars: Sequence[Polar], **options: Any
        ) -> Any:
            changed = [s._replace(step=s.step._replace(lr=factor * s.step.lr)) for s in stacks]
            return right(self, changed, polars, **options)

        return apply

    return wrong


def no_rescaling(right: Function) -> Function:
    """Algorithm 1 in place of algorithm 2."""
    return lambda self, weight, sigma, state, active: {"norm": sigma}


# The model of correlated weights.


def threshold_of_appendix(right: Function) -> Function:
    """The threshold |Z| c^(1/4) tau <= 1 as appendix D.4 prints it."""

    def wrong(c: float, tau: float, z: float) -> float:
        if abs(z) * c**0.25 * tau <= 1:
            return 1.0
        spike = (z * z * tau + 1) * (z * z * tau * c + 1)
        return math.sqrt(spike) / (abs(z) * (1 + math.sqrt(c)) * math.sqrt(tau))

    return wrong


def biased_correlation(w: Tensor) -> Tensor:
    """mean^2 / mean square, without the correction for the diagonal."""
    return w.mean((-2, -1)).square() / w.square().mean((-2, -1))


# The multiplier.


def no_multiplier(right: Function) -> Function:
    """msign(M), not tangent."""

    def wrong(m: Tensor, u: Tensor, v: Tensor, **options: Any) -> Any:
        found = right(m, u, v, **options)
        steps = options.get("steps", 8)
        return found._replace(
            multiplier=torch.zeros_like(found.multiplier), direction=msign(m, steps=steps)
        )

    return wrong


def other_sign(right: Function) -> Function:
    """Theta = -u v^T."""
    return lambda m, u, v, **options: right(m, -u, v, **options)


def other_pair(right: Function) -> Function:
    """Theta of other vectors than the singular pair."""
    return lambda m, u, v, **options: right(m, u.roll(1, 1), v, **options)


def loose(right: Function) -> Function:
    """A root to one digit."""
    return lambda m, u, v, **options: right(m, u, v, **options | {"tolerance": 0.1})


BY_EXPERIMENT: dict[str, dict[tuple[Owner, str], dict[str, Wrong]]] = {
    "pi_bound": {
        (pi_bound, "stable_rank"): {
            "the stable rank is a power too low": root_of,
            "the nuclear rank in place of the stable rank": swapped(measures.nuclear_rank),
            "the participation ratio in place of the stable rank": swapped(participation),
            "the norm of the stable rank is not squared": swapped(energy_over_norm),
        }
    },
    "relu_features": {(SpectralDescentRule, "direction"): DESCENT_OF_SQUARES},
    "gated_features": {(SpectralDescentRule, "direction"): DESCENT_OF_SQUARES},
    "rank_growth": {
        (rank_growth, "gradients"): {
            "one step too many": one_step_ahead,
            "half of the step size": half_rate,
        },
        (rank_growth, "nuclear_rank"): {
            "the nuclear rank is a power too low": root_of,
            "the stable rank in place of the nuclear rank": swapped(measures.stable_rank),
        },
    },
    "sparse_regression": {
        (SpectralDescentRule, "direction"): DESCENT_OF_SQUARES,
        (networks.BlockDescent, "scale"): {
            "Euclidean layers have the scale of spectral ones": block_scale
        },
    },
    "gated_batches": {
        (gated_batches, "stable_rank"): {
            "the stable rank is a power too low": root_of,
            "the nuclear rank in place of the stable rank": swapped(measures.nuclear_rank),
        },
        (networks, "activate"): {
            "gate and up are exchanged": lambda right: (
                lambda kind, x: right(kind, x.roll(x.shape[-1] // 2, -1))
            ),
            "the activation is a power too low": lambda right: (
                lambda kind, x: right(kind, x).abs().sqrt()
            ),
        },
    },
    "gated_regression": {
        (SpectralDescentRule, "direction"): DESCENT,
        (networks.BlockDescent, "scale"): {
            "Euclidean layers have the scale of spectral ones": block_scale
        },
    },
    "deep_linear": {
        (deep_linear, "precondition"): {
            "level 3's coefficients at level 4": relevelled(
                lambda level: 3 if level == 4 else level
            ),
            "the second coefficient is one percent too large": relevelled(second_too_large),
            "the last power is two too high": relevelled(last_power_raised),
            "the polynomial has the other sign": relevelled(negated),
            "the norm is not recovered": no_recovery,
            "the gradient passes the recovered norm": differentiated_recovery,
            "normalised by the Frobenius norm": by_frobenius_norm,
        }
    },
    "over_flattening": {
        (odd_polynomial, "COMPOSITES"): {
            "level 4 in place of the composite": composite((odd_polynomial.PRESETS[4],)),
            "a step too few": composite(FLATTENING[:-1]),
            "a step too many": composite((*FLATTENING, FLATTENING[-1])),
            "eight steps of Muon's quintic": composite((QUINTIC,) * 8),
        }
    },
    "muon_gap": {
        (muon_plus_plus, "project_"): {
            "no projection": lambda right: lambda m, u, v: m,
            "projected on the left alone": left_only,
            "u and v are exchanged": lambda right: lambda m, u, v: right(m, v, u),
        },
        (MuonRule, "apply"): {
            "ascent": scaled_step(-1.0),
            "a step twice as long": scaled_step(2.0),
        },
        (MuonPlusPlusRule, "rescale"): {"the weight is not rescaled": no_rescaling},
    },
    "correlated_weights": {
        (correlated_weights, "limit"): {"the threshold of appendix D.4": threshold_of_appendix},
        (correlated_weights, "correlated"): {
            "rho in place of its root": lambda right: (
                lambda phi, rho, z: rho * z + math.sqrt(1 - rho) * phi
            )
        },
        (correlated_weights, "correlation"): {
            "the estimate keeps the diagonal": swapped(biased_correlation),
            "the estimate has the other sign": lambda right: lambda w: -right(w),
        },
        (correlated_weights, "norm"): {
            "the norm is half of it": lambda right: lambda w: right(w) / 2
        },
    },
    "solver_curve": {
        (solver_curve, "solve_multiplier"): {
            "no multiplier": no_multiplier,
            "the multiplier has the other sign": other_sign,
            "another pair than the top one": other_pair,
            "a root to one digit": loose,
        }
    },
}
"""What takes the place of which attribute: at least four per experiment."""

WRONG_VARIANTS = [
    pytest.param(experiment, owner, name, wrong, id=f"{experiment}: {what}")
    for experiment, places in BY_EXPERIMENT.items()
    for (owner, name), wrongs in places.items()
    for what, wrong in wrongs.items()
]


def run_small(name: str) -> Sequence[Check]:
    """The checks of an experiment at its small size."""
    experiment = EXPERIMENTS[name]
    return experiment.run(experiment.small, experiment.seed).checks


passed_checks = cache(
    lambda name: frozenset(check.name for check in run_small(name) if check.passed)
)
"""Names of the checks of an experiment that the right method passes."""


@pytest.mark.parametrize(("experiment", "owner", "name", "wrong"), WRONG_VARIANTS)
def test_a_wrong_variant_fails_a_check(
    experiment: str, owner: Owner, name: str, wrong: Wrong, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = passed_checks(experiment)
    monkeypatch.setattr(owner, name, wrong(vars(owner)[name]))
    assert [check for check in run_small(experiment) if check.name in passed and not check.passed]


def test_every_experiment_has_four_wrong_variants() -> None:
    tried = Counter(variant.values[0] for variant in WRONG_VARIANTS)
    assert tried.keys() == EXPERIMENTS.keys() and min(tried.values()) >= 4
