"""Muon++: Muon whose step does not change the weight's top singular pair.

Source: "Towards a Principled Muon under muP" (arXiv 2601.01306). The weight's spectral norm should
stay at S, its value under spectral muP. Let (u, v) be the top singular pair of W. A direction D
with u^T D = 0 and D v = 0 cannot change the largest singular value as long as
lr S <= sigma_1 - sigma_2 (proposition A.1). With longer steps, another singular value may become
the largest. Since steps along such D never change (u, v), the norm can then grow without bound.
Only the algorithm with rescaling keeps the norm constant over a long run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..measures import correlation
from ..polar import Polar, coefficients, newton_schulz
from ..singular_triplets import cold_start, top_singular, triplet_cost
from ..sphere import hard_factor
from ..tangent import EVALUATIONS, Solver, bisected
from .base import Report, Stack, State, require, store_, taken
from .muon import momentum_of
from .muon_sphere import RadiusRule

Triplet = tuple[Tensor, Tensor, Tensor]  # sigma [batch], u [batch, rows], v [batch, cols]


@dataclass(frozen=True, kw_only=True)
class MuonPlusPlusRule(RadiusRule):
    """Muon++: the paper's algorithms 1 and 2, and the dual from its appendix B."""

    nesterov: bool = False
    """Orthogonalise `(1 - momentum) G + momentum M` instead of the moving average M used in the
    paper."""
    algorithm: Literal["project", "project_rescale", "dual"] = "project_rescale"
    """project: algorithm 1, which preserves the norm only while steps are shorter than sigma_1 -
    sigma_2. project_rescale: algorithm 2, which also rescales the weight to the radius. dual: a
    first-order relaxation that only requires u^T D v = 0."""
    krylov_steps: int = 10
    """Number of block Krylov steps per singular triplet and update; at least 1."""
    tolerance: float | None = None
    """Largest |u^T D v| that counts as tangent, for algorithm dual only; null means 1e-3 with
    msign_dtype float16, 5e-3 with bfloat16, and 2e-4 otherwise."""
    max_evaluations: int | None = None
    """Number of msign evaluations per unit and step, for algorithm dual only; null means 2 for
    float32 matrices with more than 256 rows on GPUs with slow float64 (consumer cards, B300), and 1
    otherwise."""
    correlation_rescale: bool = False
    """Multiply the weight by sqrt(last step's rho / rho) the first time that the correlation rho of
    the entries (eq. 4.13) exceeds its threshold. Not supported with project_rescale."""
    correlation_threshold: float = 1.0
    """Positive factor C in the paper's threshold, C (rows^-1/2 + cols^-1/2)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.dual_solver()  # raises ValueError for invalid fields
        threshold = self.correlation_threshold
        require(threshold > 0, f"correlation_threshold must be positive, got {threshold}")
        require(
            not (self.correlation_rescale and self.algorithm == "project_rescale"),
            "correlation_rescale must be False with project_rescale, got True: project_rescale "
            "would undo the rescaling",
        )

    @property
    def rescales(self) -> bool:
        """Whether each step rescales weights to the radius. See `Rule.rescales`."""
        return self.algorithm == "project_rescale"

    def settings(self) -> dict[str, Any]:
        """Return the fields by name; algorithm dual replaces a null tolerance by its default."""
        dual = self.algorithm == "dual"
        tolerance = self.accepted(self.tolerance) if dual else self.tolerance
        return super().settings() | {"tolerance": tolerance}

    def init_state(self, weight: Tensor) -> State:
        """Create the momentum and the two top singular pairs.

        The state also holds rho, and whether rho has triggered rescaling, both `[batch]`.
        """
        state = super().init_state(weight)
        sigma, state["u"], state["v"] = cold_start(weight.detach())
        rest = weight.detach() - _outer(sigma, state["u"], state["v"])
        _, state["second_u"], state["second_v"] = cold_start(rest)
        state["correlation"] = correlation(weight.detach()).to(weight.dtype)
        state["rescaled"] = weight.new_zeros(weight.shape[0])
        return state

    def update(self, stacks: Sequence[Stack]) -> list[Report]:
        """Decay the weights, then step along the projected or tangent direction. See `Rule.update`.

        Reports `sigma`, `radius`, `gap`, `gap_exceeded`, `correlation` and `update_rms`. `gap` is
        (sigma_1 - sigma_2) / sigma_1 before the update. `gap_exceeded` is 1 where the step is
        longer than sigma_1 - sigma_2, so the norm may change. With `project_rescale`, `norm` is
        also reported: the updated weight's ||W||_2 before rescaling. With `dual`, `multiplier`,
        `residual`, `evaluations` and `converged` are also reported.
        """
        return [self._step(stack) for stack in stacks]

    def _step(self, stack: Stack) -> Report:
        weight, momentum, state, (_, _, active) = stack
        report, sound = self.track(stack)
        if self.algorithm == "dual":
            # D(nu) = msign(M + nu u v^T) at the root of u^T D(nu) v. The root minimises
            # ||M + nu u v^T||_*, the dual problem in appendix B.
            (solution,) = self.dual_solver().solve([self.problem(stack)])
            polar = Polar(solution.direction, solution.bounded)
            report |= solution.report()
        else:
            # msign amplifies rounding errors in null directions, so project its result too.
            project_(momentum, state["u"], state["v"])
            (polar,) = self.polars([momentum])
            polar = polar._replace(direction=polar.direction.to(weight.dtype))
            project_(polar.direction, state["u"], state["v"])
        (applied,) = self.apply([stack], [polar], sound=sound, decays=True)
        report |= applied
        gate = taken(active, report["refused"] == 0)
        if self.algorithm == "project_rescale":
            report |= self.rescale(weight, report["sigma"], state, gate)
        return report | self.watch_correlation(weight, state, gate)

    def matrix_cost(self, short: int, long: int) -> float:
        """Return the FLOPs of triplets, msign and projections. See `MsignRule.matrix_cost`.

        Every step computes two singular triplets. With `project_rescale`, every step also computes
        a third triplet.
        """
        triplets = 3 if self.algorithm == "project_rescale" else 2
        track = triplets * triplet_cost(short, long, steps=self.krylov_steps)
        if self.algorithm == "dual":
            return track + self.solver_cost(short, long, self.max_evaluations or EVALUATIONS)
        return track + self.msign_cost(short, long) + 8.0 * 2 * short * long

    def track(self, stack: Stack) -> tuple[Report, Tensor]:
        """Refresh both singular pairs.

        Returns the report (`sigma`, `radius`, `gap` and `gap_exceeded` of the decayed weight) and a
        mask `[batch]` of sound units. A unit is sound if its squared norm and cached vectors are
        finite. The vectors of all other units are reset.
        """
        weight, _, state, (lr, weight_decay, active) = stack
        sigma, u, v = top_singular(weight, state["u"], state["v"], steps=self.krylov_steps)
        second, second_u, second_v = self.competitor(weight, (sigma, u, v), state)
        new = {"u": u, "v": v, "second_u": second_u, "second_v": second_v}
        norms = [torch.linalg.vector_norm(state[name], dim=-1) for name in new]
        sound = torch.isfinite(torch.stack([sigma.square(), *norms]).sum(0))
        for name, x in new.items():
            store_(state[name], torch.where(sound[:, None], x, 0), active)
        sigma, second = (norm * (1 - lr * weight_decay) for norm in (sigma, second))
        gap = (sigma - second).clamp_min(0)
        report = {
            "sigma": sigma,
            "radius": torch.full_like(sigma, self.radius_of(weight.shape[-2:])),
            "gap": gap / torch.where(sigma == 0, 1, sigma),
            "gap_exceeded": (lr * self.update_scale(weight.shape[-2:]) > gap).to(weight.dtype),
        }
        return report, sound

    def competitor(self, weight: Tensor, top: Triplet, state: State) -> Triplet:
        """Compute the top triplet of W - sigma u v^T, starting from the cached second pair."""
        return top_singular(
            weight - _outer(*top), state["second_u"], state["second_v"], steps=self.krylov_steps
        )

    def dual_solver(self) -> Solver:
        """Return the solver for algorithm dual."""
        return self.solver(self.tolerance, max_evaluations=self.max_evaluations)

    def rescale(self, weight: Tensor, sigma: Tensor, state: State, gate: Tensor) -> Report:
        """Multiply the updated `weight` by S / ||W||_2 where `gate` `[batch]` is True.

        Reports ||W||_2.

        The update leaves the triplet (u, v, sigma) unchanged, so iterations started from this
        triplet would never find a singular value that has overtaken sigma. ||W||_2 is therefore
        computed as the larger of sigma and the top singular value of W - sigma u v^T.
        """
        other, u, v = self.competitor(weight, (sigma, state["u"], state["v"]), state)
        overtaken = (other > sigma)[:, None]
        for name, new in (("u", u), ("v", v)):
            old = state[name]
            first, second = torch.where(overtaken, new, old), torch.where(overtaken, old, new)
            store_(old, first, gate)
            store_(state[f"second_{name}"], second, gate)
        norm = torch.maximum(sigma, other)
        factor = hard_factor(norm, self.radius_of(weight.shape[-2:]))
        weight.mul_(factor.masked_fill(~gate, 1)[:, None, None])
        return {"norm": norm}

    def watch_correlation(self, weight: Tensor, state: State, gate: Tensor) -> Report:
        """Report the updated weight's `correlation`. With correlation_rescale, rescale each matrix
        at most once, and only where `gate` `[batch]` is True."""
        rows, cols = weight.shape[-2:]
        now, last = correlation(weight).to(weight.dtype), state["correlation"]
        if self.correlation_rescale:
            threshold = self.correlation_threshold * (rows**-0.5 + cols**-0.5)
            # Below 1 / (rows cols), the estimate is noise of either sign, and ratios are useless.
            due = (now > threshold) & (state["rescaled"] == 0) & (last > 1 / (rows * cols))
            due = due & gate & last.isfinite()
            factor = torch.where(due, (last / now).sqrt(), 1)
            weight.mul_(factor[:, None, None])
            state["rescaled"].masked_fill_(due, 1)
        store_(last, now, gate)
        return {"correlation": now}


def project_(m: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Replace `m` `[batch, rows, cols]` with (I - u u^T) M (I - v v^T) for unit or zero u, v."""
    m.baddbmm_(u[:, :, None], u[:, None, :] @ m, alpha=-1)
    return m.baddbmm_(m @ v[:, :, None], v[:, None, :], alpha=-1)


def _outer(sigma: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Compute sigma u v^T `[batch, rows, cols]`."""
    return (sigma[:, None] * u)[:, :, None] * v[:, None, :]


def reference(
    rule: MuonPlusPlusRule,
    weight: Tensor,  # [rows, cols]
    grad: Tensor,  # [rows, cols]
    state: State,  # momentum [rows, cols], correlation and rescaled 0-d
    lr: float,
    weight_decay: float,
) -> tuple[Tensor, State]:
    """Update one matrix with Muon++ in plain code. `MuonPlusPlusRule` computes the same update.

    Source: "Towards a Principled Muon under muP" (arXiv 2601.01306): algorithm 1, algorithm 2 for
    project_rescale, and appendix B for dual. S is sqrt(rows / cols) by default.
    """
    steps = coefficients(rule.schedule, rule.steps, weight.dtype)  # msign polynomials
    M, B = momentum_of(rule, grad, state)  # mean M of the gradients, B with Nesterov's look-ahead
    W = weight * (1 - lr * weight_decay)
    U, _, Vh = torch.linalg.svd(W, full_matrices=False)
    u, v = U[:, 0], Vh[0]  # [rows], [cols], the top singular pair
    if rule.algorithm == "dual":
        D = bisected(B, torch.outer(u, v), steps)  # msign(B + nu u v^T) with u^T D v = 0
    else:
        P, Q = (torch.eye(len(x)).to(W) - torch.outer(x, x) for x in (u, v))
        D = P @ newton_schulz(P @ B @ Q, steps) @ Q  # P msign(P B Q) Q: u^T D = 0 and D v = 0
    W = W - lr * rule.update_scale(W.shape) * D
    if rule.algorithm == "project_rescale":  # W S / ||W||_2
        W = W * (rule.radius_of(W.shape) / torch.linalg.matrix_norm(W, ord=2))
    rho, last = correlation(W), state["correlation"]  # eq. 4.13
    C = rule.correlation_threshold * (W.shape[0] ** -0.5 + W.shape[1] ** -0.5)
    due = rule.correlation_rescale and rho > C and last > 1 / W.numel() and not state["rescaled"]
    W = W * (last / rho).sqrt() if due else W
    return W, {"momentum": M, "correlation": rho, "rescaled": state["rescaled"] + due}
