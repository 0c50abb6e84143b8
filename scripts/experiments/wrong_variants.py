"""Wrong variants of the methods, each of which must fail at least one check of its experiment.

An experiment that a wrong method passes says nothing. A variant replaces one function of the method
by a wrong one while the experiment runs at its small size, where only statements of the papers and
theory are checked, no recorded number.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

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
from scripts.experiments.experiment import Experiment
from spectral import measures, msign, odd_polynomial
from spectral.polar import Polar
from spectral.rules import MuonPlusPlusRule, MuonRule, SpectralDescentRule, muon_plus_plus
from spectral.schedules import SCHEDULES

Function = Callable[..., Any]
Wrong = Callable[[Any], Any]
"""From what is right to what is wrong."""


@dataclass(frozen=True)
class WrongVariant:
    """Something wrong with the method of `experiment`: `wrong(right)` takes the place of the
    attribute `name` of `owner`."""

    experiment: str
    what: str
    owner: ModuleType | type
    name: str
    wrong: Wrong

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the wrong variant inside the `with` statement."""
        right = vars(self.owner)[self.name]
        setattr(self.owner, self.name, self.wrong(right))
        try:
            yield
        finally:
            setattr(self.owner, self.name, right)

    def failures(self, experiment: Experiment[Any]) -> list[Check]:
        """Return the checks of the experiment, at its small size, that fail with the variant and
        pass without it."""
        passed = passed_checks(experiment)
        with self.applied():
            outcome = experiment.run(experiment.small, experiment.seed, False)
        return [check for check in outcome.checks if check.name in passed and not check.passed]


@cache
def passed_checks(experiment: Experiment[Any]) -> frozenset[str]:
    """Names of the checks of an experiment, at its small size, that the right method passes."""
    outcome = experiment.run(experiment.small, experiment.seed, False)
    return frozenset(check.name for check in outcome.checks if check.passed)


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


def transposed_polar(right: Function) -> Function:
    """The polar factor of the transposed gradient, of square matrices."""

    def wrong(self: SpectralDescentRule, grad: Tensor) -> Polar:
        found = right(self, grad)
        return Polar(found.direction.mT.contiguous(), found.bounded)

    return wrong


def gradient_direction(right: Function) -> Function:
    """The normalised gradient in place of its polar factor."""

    def wrong(self: SpectralDescentRule, grad: Tensor) -> Polar:
        return Polar(grad / torch.linalg.matrix_norm(grad)[:, None, None], right(self, grad)[1])

    return wrong


def no_nuclear_norm(right: Function) -> Function:
    """A direction whose step is the polar factor, not |G|_* times it."""

    def wrong(self: SpectralDescentRule, grad: Tensor) -> Polar:
        direction, bounded = right(self, grad)
        size = (grad * direction).sum((-2, -1)).abs().sqrt()
        return Polar(direction / size[:, None, None], bounded)

    return wrong


def three_steps(right: Function) -> Function:
    """msign of three steps, which leaves small singular values small."""

    def wrong(self: SpectralDescentRule, grad: Tensor) -> Polar:
        found = right(self, grad)
        return Polar(msign(grad, steps=3), found.bounded)

    return wrong


def half_direction(right: Function) -> Function:
    """Half of the polar factor, and so a quarter of the step."""

    def wrong(self: SpectralDescentRule, grad: Tensor) -> Polar:
        direction, bounded = right(self, grad)
        return Polar(direction / 2, bounded)

    return wrong


def descents(experiment: str, *, square: bool = True) -> list[WrongVariant]:
    """Wrong variants of spectral descent; on matrices that are not `square`, those that neither
    change the shape nor diverge."""
    wrongs: list[tuple[str, Wrong]] = [
        ("the gradient is not orthogonalised", gradient_direction),
        ("the nuclear norm is left out", no_nuclear_norm),
        ("the polar factor is halved", half_direction),
    ]
    if square:
        wrongs.append(("the polar factor is transposed", transposed_polar))
        wrongs.append(("msign takes three steps", three_steps))
    return [
        WrongVariant(experiment, what, SpectralDescentRule, "direction", wrong)
        for what, wrong in wrongs
    ]


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
            self: MuonRule, weight: Tensor, polar: Polar, lr: float, active: Tensor | None
        ) -> Any:
            return right(self, weight, polar, factor * lr, active)

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


WRONG_VARIANTS: tuple[WrongVariant, ...] = (
    *(
        WrongVariant("pi_bound", what, pi_bound, "stable_rank", wrong)
        for what, wrong in (
            ("the stable rank is a power too low", root_of),
            ("the nuclear rank in place of the stable rank", swapped(measures.nuclear_rank)),
            ("the participation ratio in place of the stable rank", swapped(participation)),
            ("the norm of the stable rank is not squared", swapped(energy_over_norm)),
        )
    ),
    *descents("relu_features"),
    *descents("gated_features"),
    WrongVariant("rank_growth", "one step too many", rank_growth, "gradients", one_step_ahead),
    WrongVariant("rank_growth", "half of the step size", rank_growth, "gradients", half_rate),
    WrongVariant(
        "rank_growth", "the nuclear rank is a power too low", rank_growth, "nuclear_rank", root_of
    ),
    WrongVariant(
        "rank_growth",
        "the stable rank in place of the nuclear rank",
        rank_growth,
        "nuclear_rank",
        swapped(measures.stable_rank),
    ),
    *descents("sparse_regression"),
    WrongVariant(
        "sparse_regression",
        "Euclidean layers have the scale of spectral ones",
        networks.BlockDescent,
        "scale",
        block_scale,
    ),
    WrongVariant(
        "gated_batches", "the stable rank is a power too low", gated_batches, "stable_rank", root_of
    ),
    WrongVariant(
        "gated_batches",
        "the nuclear rank in place of the stable rank",
        gated_batches,
        "stable_rank",
        swapped(measures.nuclear_rank),
    ),
    WrongVariant(
        "gated_batches",
        "gate and up are exchanged",
        networks,
        "activate",
        lambda right: lambda kind, x: right(kind, x.roll(x.shape[-1] // 2, -1)),
    ),
    WrongVariant(
        "gated_batches",
        "the activation is a power too low",
        networks,
        "activate",
        lambda right: lambda kind, x: right(kind, x).abs().sqrt(),
    ),
    *descents("gated_regression", square=False),
    WrongVariant(
        "gated_regression",
        "Euclidean layers have the scale of spectral ones",
        networks.BlockDescent,
        "scale",
        block_scale,
    ),
    *(
        WrongVariant("deep_linear", what, deep_linear, "precondition", wrong)
        for what, wrong in (
            (
                "level 3's coefficients at level 4",
                relevelled(lambda level: 3 if level == 4 else level),
            ),
            ("the second coefficient is one percent too large", relevelled(second_too_large)),
            ("the last power is two too high", relevelled(last_power_raised)),
            ("the polynomial has the other sign", relevelled(negated)),
            ("the norm is not recovered", no_recovery),
            ("the gradient passes the recovered norm", differentiated_recovery),
            ("normalised by the Frobenius norm", by_frobenius_norm),
        )
    ),
    *(
        WrongVariant("over_flattening", what, odd_polynomial, "COMPOSITES", composite(stages))
        for what, stages in (
            ("level 4 in place of the composite", (odd_polynomial.PRESETS[4],)),
            ("a step too few", FLATTENING[:-1]),
            ("a step too many", (*FLATTENING, FLATTENING[-1])),
            ("eight steps of Muon's quintic", (QUINTIC,) * 8),
        )
    ),
    WrongVariant(
        "muon_gap", "no projection", muon_plus_plus, "project_", lambda right: lambda m, u, v: m
    ),
    WrongVariant("muon_gap", "projected on the left alone", muon_plus_plus, "project_", left_only),
    WrongVariant(
        "muon_gap",
        "u and v are exchanged",
        muon_plus_plus,
        "project_",
        lambda right: lambda m, u, v: right(m, v, u),
    ),
    WrongVariant("muon_gap", "ascent", MuonRule, "apply", scaled_step(-1.0)),
    WrongVariant("muon_gap", "a step twice as long", MuonRule, "apply", scaled_step(2.0)),
    WrongVariant(
        "muon_gap", "the weight is not rescaled", MuonPlusPlusRule, "rescale", no_rescaling
    ),
    WrongVariant(
        "correlated_weights",
        "the threshold of appendix D.4",
        correlated_weights,
        "limit",
        threshold_of_appendix,
    ),
    WrongVariant(
        "correlated_weights",
        "rho in place of its root",
        correlated_weights,
        "correlated",
        lambda right: lambda phi, rho, z: rho * z + math.sqrt(1 - rho) * phi,
    ),
    WrongVariant(
        "correlated_weights",
        "the estimate keeps the diagonal",
        correlated_weights,
        "correlation",
        swapped(biased_correlation),
    ),
    WrongVariant(
        "correlated_weights",
        "the estimate has the other sign",
        correlated_weights,
        "correlation",
        lambda right: lambda w: -right(w),
    ),
    WrongVariant(
        "correlated_weights",
        "the norm is half of it",
        correlated_weights,
        "norm",
        lambda right: lambda w: right(w) / 2,
    ),
    *(
        WrongVariant("solver_curve", what, solver_curve, "solve_multiplier", wrong)
        for what, wrong in (
            ("no multiplier", no_multiplier),
            ("the multiplier has the other sign", other_sign),
            ("another pair than the top one", other_pair),
            ("a root to one digit", loose),
        )
    ),
)
"""At least four per experiment."""


HEADINGS = ("experiment", "wrong variant", "failed checks", "")


def row(variant: WrongVariant, failed: Sequence[Check]) -> tuple[str, ...]:
    """The line of a variant under `HEADINGS`."""
    verdict = f"{len(failed)}, such as {failed[0].name}" if failed else "none"
    return variant.experiment, variant.what, verdict, "found" if failed else "NOT FOUND"
