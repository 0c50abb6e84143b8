"""MuonSphere: Muon with retraction to the spectral sphere, without tangency (SSO paper)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..batching import apart, numbers, together
from ..cost import tangent_cost, triplet_cost
from ..polar import coefficients, is_tall, newton_schulz, normalized_
from ..singular_triplets import BLOCK, NEARBY, cold_start, top_pairs
from ..sphere import Scale, dynamic_factor, hard_factor, radius
from ..tangent import Solver, TangentProblem, tolerance_for
from .base import (
    Report,
    Stack,
    State,
    decay_,
    rate_of_stacks,
    require,
    store_,
    taken,
)
from .muon import PolarRule, matrix_shape, momentum_of


@dataclass(frozen=True, kw_only=True)
class RadiusRule(PolarRule):
    """Muon on weights that keep a spectral norm, their radius."""

    radius: Scale = "spectral_mup"
    """How the radius R depends on the unit's shape (docs/spectral.md)."""
    radius_scaler: float = 1.0
    """Factor of the radius, the paper's c; positive."""
    krylov_steps: int = 4
    """Block Krylov steps per update from the last step's singular vectors, at least 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.radius_scaler > 0, f"radius_scaler must be positive, got {self.radius_scaler}")
        require(self.krylov_steps >= 1, f"krylov_steps must be at least 1, got {self.krylov_steps}")

    def radius_of(self, shape: tuple[int, int]) -> float:
        """Return the radius R of a unit; see `Rule.radius_of`."""
        return radius(shape, self.radius, self.radius_scaler)

    def accepted(self, tolerance: float | None) -> float:
        """Return the tolerance of a solve for tangent directions, the default filled in."""
        return tolerance_for(self.dtype or torch.float32, tolerance)

    def solver(self, tolerance: float | None, **options: Any) -> Solver:
        """Return the solver for tangent directions; `options` are those that do not say how msign
        is computed."""
        options |= {"schedule": self.schedule, "steps": self.steps, "dtype": self.dtype}
        return Solver(tolerance=self.accepted(tolerance), **options)

    def problem(self, stack: Stack) -> TangentProblem:
        """Return what to solve for the units of a stack, whose gradient is used up."""
        grad = normalized_(stack.grad, torch.promote_types(stack.grad.dtype, torch.float32))
        return TangentProblem(grad, stack.state["u"], stack.state["v"])

    def solver_cost(self, short: int, long: int, evaluations: float) -> float:
        """Count the FLOPs of a solve with so many `evaluations` of msign."""
        msign, dtype = self.msign_cost(short, long), self.dtype or torch.float32
        return tangent_cost(short, long, evaluations=evaluations, msign=msign, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class MuonSphereRule(RadiusRule):
    """Muon whose weights are rescaled to spectral norm R before every update."""

    retraction: Literal["hard", "dynamic"] = field(
        default="hard",
        metadata={
            "no_decay": "dynamic",
            "why": "as it shrinks a weight below the sphere while the retraction lets it grow",
            "undoes_decay": "hard",
        },
    )
    """hard: rescale to R exactly. dynamic: multiply by `1 +- retraction_rate lr` towards R."""
    retraction_rate: float = 0.1
    """Rate of the dynamic retraction (the paper's lambda_wd); not negative."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.retraction_rate >= 0,
            f"retraction_rate must not be negative, got {self.retraction_rate}",
        )

    def init_state(self, weight: Tensor) -> State:
        """Create the momentum and the top singular vectors u `[batch, rows]`, v `[batch, cols]`.

        And nearby `[batch, NEARBY, shorter side]`, which the first step fills.
        """
        state = super().init_state(weight)
        _, state["u"], state["v"] = cold_start(weight.detach())
        state["nearby"] = weight.new_zeros(len(weight), NEARBY, min(weight.shape[1:]))
        return state

    def update(self, stacks: Sequence[Stack]) -> list[Report]:
        """Decay, retract and descend; see `Rule.update`.

        Reports `sigma` (before retraction), `radius`, `update_rms` and `refused`.
        """
        reports, sound, factor = self.track(stacks)
        polars = self.polars([stack.grad for stack in stacks])
        others = self.apply(stacks, polars, sound=sound, scale=factor)
        return [report | other for report, other in zip(reports, others, strict=True)]

    def matrix_cost(self, short: int, long: int) -> float:
        """Count the FLOPs of one msign and the top singular triplet; see `Rule.matrix_cost`."""
        return self.msign_cost(short, long) + self.track_cost(short, long)

    def track_cost(self, short: int, long: int) -> float:
        """Count the FLOPs of `track` for a matrix with sides `short <= long`."""
        return triplet_cost(short, long, steps=self.krylov_steps, vectors=BLOCK)

    def track(self, stacks: Sequence[Stack]) -> tuple[list[Report], Tensor, Tensor]:
        """Decay, refresh u, v and nearby, and find the way to the sphere.

        Reports `sigma` and `radius` of each stack. Also returns, `[sum of batches]`, whether each
        unit is sound, which is that the squares of its norm and of its cached vectors are finite,
        and the factor that retracts its weight. A unit that is not sound stays where it is, with
        the factor 1, and forgets its vectors, so that its next step starts cold.
        """
        for stack in stacks:
            decay_(stack.weight, *stack.step)
        active = stacks[0].step.active
        weights = [stack.weight for stack in stacks]
        names = [("v", "u") if is_tall(w) else ("u", "v") for w in weights]  # short and long
        states = [
            [stack.state[name] for name in (*pair, "nearby")]
            for stack, pair in zip(stacks, names, strict=True)
        ]
        shorts, longs, nearby = zip(*states, strict=True)
        cached = together(shorts)
        lengths = cached.norm(dim=-1) + together([long.norm(dim=-1) for long in longs])
        wide = [w.mT if is_tall(w) else w for w in weights]
        top = top_pairs(wide, cached, steps=self.krylov_steps, nearby=together(nearby))
        sigma, short, long = top.sigma.to(weights[0].dtype), top.short, top.long
        sound = torch.addcmul(lengths, sigma, sigma) < float("inf")
        unsound = ~sound[:, None]
        short.masked_fill_(unsound, 0)
        for x, mask in zip(long, apart(unsound, weights), strict=True):
            x.masked_fill_(mask, 0)
        assert top.nearby is not None
        others = top.nearby.masked_fill_(unsound[:, :, None], 0)
        news = zip(apart(short, weights), long, apart(others, weights), strict=True)
        for state, new in zip(states, news, strict=True):
            for old, vectors in zip(state, new, strict=True):
                store_(old, vectors, active)
        target = numbers([self.radius_of(matrix_shape(w)) for w in weights], weights)
        gate = taken(active, sound)
        if self.retraction == "hard":
            factor = hard_factor(sigma, target, active=gate)
        else:
            lr = rate_of_stacks([stack.step.lr for stack in stacks], weights)
            factor = dynamic_factor(sigma, target, rate=self.retraction_rate, lr=lr, active=gate)
        figures = zip(apart(sigma, weights), apart(target, weights), strict=True)
        return [{"sigma": each, "radius": radius} for each, radius in figures], sound, factor


def reference(
    rule: MuonSphereRule,
    weight: Tensor,  # [rows, cols]
    grad: Tensor,  # [rows, cols]
    state: State,  # momentum [rows, cols]
    lr: float,
    weight_decay: float,
) -> tuple[Tensor, State]:
    """Step one matrix by MuonSphere as plainly as possible; `MuonSphereRule` equals it.

    Source: "Controlled LLM Training on Spectral Sphere": SSO without its multiplier.
    """
    W = retracted(rule, weight * (1 - lr * weight_decay), lr)
    M, B = momentum_of(rule, grad, state)
    Phi = newton_schulz(B, coefficients(rule.schedule, rule.steps, W.dtype))  # msign(B)
    return W - lr * rule.update_scale(matrix_shape(W)) * Phi, {"momentum": M}


def retracted(rule: MuonSphereRule, weight: Tensor, lr: float) -> Tensor:
    """Return one matrix `[rows, cols]` moved to, or towards, the sphere ||W||_2 = R."""
    R = rule.radius_of(matrix_shape(weight))
    sigma: Tensor = torch.linalg.matrix_norm(weight, ord=2)
    if rule.retraction == "hard":
        return weight * (R / sigma)  # eq. 13
    return weight * (1 + rule.retraction_rate * lr * torch.sign(R - sigma))  # eq. 34
