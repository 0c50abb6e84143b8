"""The Spectral Sphere Optimizer (SSO): steepest descent tangent to `||W||_2 = R`.

Source: "Controlled LLM Training on Spectral Sphere" (arXiv 2601.08393), algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..polar import Polar, coefficients
from ..tangent import EVALUATIONS, Solver, bisected
from .base import Report, Stack, State
from .muon import momentum_of
from .muon_sphere import MuonSphereRule, retracted

EARLY_EXIT_EVALUATIONS = 8
"""Default limit on msign evaluations with early exit."""
MEAN_EARLY_EXIT_EVALUATIONS = 1.05
"""Mean number of msign evaluations with early exit at tolerance 2e-4, used by `cost`."""


@dataclass(frozen=True, kw_only=True)
class SpectralSphereRule(MuonSphereRule):
    """SSO, the paper's algorithm 1: retract, then step along `msign(M + lambda u v^T)`."""

    tolerance: float | None = None
    """Largest |<u v^T, direction>| that counts as tangent; null means 1e-3 with msign_dtype
    float16, 5e-3 with bfloat16 (msign's rounding errors), and 2e-4 otherwise. In 16 bits, a
    component along u v^T of up to 0.05 (float16) or 0.1 (bfloat16) is attributed to rounding and
    subtracted from the direction; a larger component is kept."""
    max_evaluations: int | None = None
    """Maximum number of msign evaluations per unit and step; without early exit, the exact number.
    null means 8 with early exit; without early exit, 2 for float32 matrices with more than 256 rows
    on GPUs with slow float64 (consumer cards, B300), and 1 otherwise."""
    early_exit: bool | None = None
    """Stop once all units have converged, which requires a host sync; null means true on CPU, else
    false."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.solver_on(torch.device("cpu"))  # raises ValueError for invalid fields

    @property
    def waiting_field(self) -> str | None:
        """The field that causes a host sync in each step, if any."""
        return "early_exit" if self.early_exit else None

    def settings(self) -> dict[str, Any]:
        """Return the fields by name, with a null tolerance replaced by its default."""
        return super().settings() | {"tolerance": self.accepted(self.tolerance)}

    def update(self, stacks: Sequence[Stack]) -> list[Report]:
        """Decay and retract the weights, then step along the tangent direction. See `Rule.update`.

        Reports the metrics of MuonSphere, and the metrics in `TangentSolution.report`.
        """
        tracked, sound, retraction = self.track(stacks)
        solver = self.solver_on(stacks[0].grad.device)
        solutions = solver.solve([self.problem(stack) for stack in stacks])  # <Theta, Phi> = 0
        polars = [Polar(solution.direction, solution.bounded) for solution in solutions]
        applied = self.apply(stacks, polars, sound=sound, retraction=retraction)
        reports = zip(tracked, applied, solutions, strict=True)
        return [before | after | solved.report() for before, after, solved in reports]

    def matrix_cost(self, short: int, long: int) -> float:
        """Return the FLOPs of the singular triplet and the solve. See `MsignRule.matrix_cost`.

        If `early_exit` is null, all evaluations are counted, as on a GPU.
        """
        evaluations = float(self.max_evaluations or EVALUATIONS)
        if self.early_exit:
            evaluations = MEAN_EARLY_EXIT_EVALUATIONS
        return self.track_cost(short, long) + self.solver_cost(short, long, evaluations)

    def solver_on(self, device: torch.device) -> Solver:
        """Return the solver for a device, with nulls replaced by their defaults."""
        early = device.type == "cpu" if self.early_exit is None else self.early_exit
        limit = EARLY_EXIT_EVALUATIONS if early else None
        return self.solver(
            self.tolerance,
            max_evaluations=limit if self.max_evaluations is None else self.max_evaluations,
            early_exit=early,
        )


def reference(
    rule: SpectralSphereRule,
    weight: Tensor,  # [rows, cols]
    grad: Tensor,  # [rows, cols]
    state: State,  # momentum [rows, cols]
    lr: float,
    weight_decay: float,
) -> tuple[Tensor, State]:
    """Update one matrix with SSO in plain code. `SpectralSphereRule` computes the same update.

    Source: "Controlled LLM Training on Spectral Sphere" (arXiv 2601.08393), algorithm 1. R and the
    update scale default to sqrt(rows / cols) (eq. 16).
    """
    M, B = momentum_of(rule, grad, state)  # mean M of the gradients, B with Nesterov's look-ahead
    W = weight * (1 - lr * weight_decay)
    U, _, Vh = torch.linalg.svd(W, full_matrices=False)
    Theta = torch.outer(U[:, 0], Vh[0])  # u v^T [rows, cols], the gradient of ||W||_2 (eq. 9)
    W = retracted(rule, W, lr)  # eq. 13: W R / ||W||_2
    # Phi = msign(B / ||B||_F + lambda Theta), with lambda found by bisection so that <Theta, Phi> =
    # 0 (eqs. 11 and 12): to first order, the update leaves ||W||_2 unchanged.
    Phi = bisected(B, Theta, coefficients(rule.schedule, rule.steps, W.dtype))
    return W - lr * rule.update_scale(W.shape) * Phi, {"momentum": M}
