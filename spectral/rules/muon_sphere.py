"""MuonSphere: Muon with retraction to the spectral sphere, without SSO's tangent condition.

Source: "Controlled LLM Training on Spectral Sphere" (arXiv 2601.08393).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..batching import concat, numbers, split_figures, split_like
from ..polar import coefficients, is_tall, newton_schulz, normalized_
from ..singular_triplets import BLOCK, NEARBY, cold_start, top_pairs, triplet_cost
from ..sphere import Scale, dynamic_factor, hard_factor, radius
from ..tangent import Solver, TangentProblem, tolerance_for
from ..tangent_model import tangent_cost
from .base import Report, Stack, State, rate_of_stacks, require, store_
from .muon import PolarRule, momentum_of


@dataclass(frozen=True, kw_only=True)
class RadiusRule(PolarRule):
    """Base class for rules that keep the spectral norm of weights at a radius."""

    radius: Scale = "spectral_mup"
    """Formula for the shape-dependent radius R (docs/spectral.md)."""
    radius_scaler: float = 1.0
    """Positive multiplier for the radius (the paper's c)."""
    krylov_steps: int = 4
    """Number of block Krylov steps per update, warm-started from the previous singular vectors; at
    least 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.radius_scaler > 0, f"radius_scaler must be positive, got {self.radius_scaler}")
        require(self.krylov_steps >= 1, f"krylov_steps must be at least 1, got {self.krylov_steps}")

    def radius_of(self, shape: Sequence[int]) -> float:
        """Return the radius R of a unit. See `Rule.radius_of`."""
        return radius(shape, self.radius, self.radius_scaler)

    def accepted(self, tolerance: float | None) -> float:
        """Return `tolerance` or, if it is None, the default tolerance for tangent directions."""
        return tolerance_for(self.dtype or torch.float32, tolerance)

    def solver(self, tolerance: float | None, **options: Any) -> Solver:
        """Return the solver for tangent directions, with the rule's msign options."""
        options |= {"schedule": self.schedule, "steps": self.steps, "dtype": self.dtype}
        return Solver(tolerance=self.accepted(tolerance), **options)

    def problem(self, stack: Stack) -> TangentProblem:
        """Return a stack's tangent problem. Overwrites the stack's gradient."""
        grad = normalized_(stack.grad, torch.promote_types(stack.grad.dtype, torch.float32))
        return TangentProblem(grad, stack.state["u"], stack.state["v"])

    def solver_cost(self, short: int, long: int, evaluations: float) -> float:
        """Return the FLOPs of a solve with `evaluations` msign evaluations."""
        msign, dtype = self.msign_cost(short, long), self.dtype or torch.float32
        return tangent_cost(short, long, evaluations=evaluations, msign=msign, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class MuonSphereRule(RadiusRule):
    """Muon whose weights are rescaled to spectral norm R before every update."""

    retraction: Literal["hard", "dynamic"] = "hard"
    """hard: rescale to R exactly. dynamic: multiply by `1 +- retraction_rate lr` towards R."""
    retraction_rate: float = 0.1
    """Rate of the dynamic retraction (the paper's lambda_wd); must not be negative."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.retraction_rate >= 0,
            f"retraction_rate must not be negative, got {self.retraction_rate}",
        )

    @property
    def undoes_decay(self) -> bool:
        """Whether weight decay has no effect because the weight is rescaled to R afterwards."""
        return self.rescales

    @property
    def rescales(self) -> bool:
        """Whether each step rescales weights to R. See `Rule.rescales`."""
        return self.retraction == "hard"

    def decay_problem(self, weight_decay: float) -> str | None:
        """Return the reason why this weight decay cannot be used with the rule, or None."""
        if self.retraction == "hard" or weight_decay <= 0:
            return None
        return (
            f"weight_decay must be 0 with retraction dynamic, got {weight_decay}: weight "
            "decay would counteract the retraction to the radius"
        )

    def init_state(self, weight: Tensor) -> State:
        """Create the momentum and the top singular vectors `u` and `v`.

        `u` is `[batch, rows]` and `v` is `[batch, cols]`. The state also contains `nearby`,
        `[batch, NEARBY, shorter side]`, which is zero until the first step.
        """
        state = super().init_state(weight)
        _, state["u"], state["v"] = cold_start(weight.detach())
        state["nearby"] = weight.new_zeros(len(weight), NEARBY, min(weight.shape[1:]))
        return state

    def update(self, stacks: Sequence[Stack]) -> list[Report]:
        """Decay, retract and update the weights. See `Rule.update`.

        Reports `sigma` (before retraction), `radius`, `update_rms` and `refused`.
        """
        tracked, sound, retraction = self.track(stacks)
        polars = self.polars([stack.grad for stack in stacks])
        applied = self.apply(stacks, polars, sound=sound, retraction=retraction)
        return [before | after for before, after in zip(tracked, applied, strict=True)]

    def matrix_cost(self, short: int, long: int) -> float:
        """Return the FLOPs of msign and the top singular triplet. See `MsignRule.matrix_cost`."""
        return self.msign_cost(short, long) + self.track_cost(short, long)

    def track_cost(self, short: int, long: int) -> float:
        """Return the FLOPs of `track` on a matrix with sides `short <= long`."""
        return triplet_cost(short, long, steps=self.krylov_steps, vectors=BLOCK)

    def track(self, stacks: Sequence[Stack]) -> tuple[list[Report], Tensor, Tensor]:
        """Refresh `u`, `v` and `nearby`, and compute the retraction to the sphere.

        Returns a report for each stack (`sigma` and `radius`) and two tensors `[sum of batches]`:
        whether each unit is sound, and each weight's combined decay and retraction factor. A unit
        is sound if its squared norm and the norms of its cached vectors are finite. The vectors of
        all other units are reset, so their next step is a cold start.
        """
        weights, active = [stack.weight for stack in stacks], stacks[0].step.active
        vectors = [_vectors(stack) for stack in stacks]
        short, long, nearby = zip(*vectors, strict=True)
        cached = concat(short)
        lengths = cached.norm(dim=-1) + concat([v.norm(dim=-1) for v in long])
        wide = [w.mT if is_tall(w) else w for w in weights]
        top = top_pairs(wide, cached, steps=self.krylov_steps, nearby=concat(nearby))
        sigma = top.sigma.to(weights[0].dtype)
        sound = torch.addcmul(lengths, sigma, sigma) < float("inf")
        unsound = ~sound[:, None]
        assert top.nearby is not None
        new_short = split_like(top.short.masked_fill_(unsound, 0), weights)
        for v, mask in zip(top.long, split_like(unsound, weights), strict=True):
            v.masked_fill_(mask, 0)
        new_nearby = split_like(top.nearby.masked_fill_(unsound[:, :, None], 0), weights)
        refreshed = zip(new_short, top.long, new_nearby, strict=True)
        for old_vectors, new_vectors in zip(vectors, refreshed, strict=True):
            for old, new in zip(old_vectors, new_vectors, strict=True):
                store_(old, new, active)
        radius = numbers([self.radius_of(w.shape[1:]) for w in weights], weights)
        if self.retraction == "hard":  # hard retraction undoes the decay
            retraction = hard_factor(sigma, radius)
        else:
            lr = rate_of_stacks([stack.step.lr for stack in stacks], weights)
            decay = rate_of_stacks([stack.step.weight_decay for stack in stacks], weights)
            kept = 1 - lr * decay
            sigma = sigma * kept
            retraction = dynamic_factor(sigma, radius, rate=self.retraction_rate, lr=lr) * kept
        return split_figures({"sigma": sigma, "radius": radius}, weights), sound, retraction


def _vectors(stack: Stack) -> tuple[Tensor, Tensor, Tensor]:
    """Return the singular vectors of the shorter and longer side, and the nearby vectors."""
    u, v, nearby = (stack.state[name] for name in ("u", "v", "nearby"))
    return (v, u, nearby) if is_tall(stack.weight) else (u, v, nearby)


def retracted(rule: MuonSphereRule, weight: Tensor, lr: float) -> Tensor:
    """Return one matrix `[rows, cols]` rescaled to, or towards, the sphere ||W||_2 = R."""
    R = rule.radius_of(weight.shape[-2:])
    sigma: Tensor = torch.linalg.matrix_norm(weight, ord=2)
    if rule.retraction == "hard":
        return weight * (R / sigma)  # eq. 13
    return weight * (1 + rule.retraction_rate * lr * torch.sign(R - sigma))  # eq. 34


def reference(
    rule: MuonSphereRule,
    weight: Tensor,  # [rows, cols]
    grad: Tensor,  # [rows, cols]
    state: State,  # momentum [rows, cols]
    lr: float,
    weight_decay: float,
) -> tuple[Tensor, State]:
    """Update one matrix with MuonSphere in plain code. `MuonSphereRule` computes the same update.

    Source: "Controlled LLM Training on Spectral Sphere" (arXiv 2601.08393), algorithm 1 with the
    multiplier lambda = 0. R and the update scale default to sqrt(rows / cols) (eq. 16).
    """
    M, B = momentum_of(rule, grad, state)  # mean M of the gradients, B with Nesterov's look-ahead
    W = retracted(rule, weight * (1 - lr * weight_decay), lr)  # eq. 13: W R / ||W||_2
    Phi = newton_schulz(B, coefficients(rule.schedule, rule.steps, W.dtype))  # msign(B)
    return W - lr * rule.update_scale(W.shape) * Phi, {"momentum": M}
