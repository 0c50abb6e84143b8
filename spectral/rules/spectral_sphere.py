"""The Spectral Sphere Optimizer (SSO): steepest descent tangent to `||W||_2 = R`.

Source: "Controlled LLM Training on Spectral Sphere", algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cost import Product, tangent_cost
from ..joined_stacks import apart
from ..polar import Polar, normalize_
from ..tangent import (
    EVALUATIONS,
    TangentProblem,
    TangentSolution,
    solve_multipliers,
    tolerance_for,
)
from .base import COPY, Rate, Report, Stack, State, decay_, require, taken
from .muon import scale_
from .muon_sphere import MuonSphereRule

EARLY_EXIT_EVALUATIONS = 8
"""Default limit of msign evaluations with early exit."""
MEAN_EARLY_EXIT_EVALUATIONS = 1.05
"""Mean msign evaluations of a solve to 2e-4 that stops early (docs/solver.md), for the cost."""


@dataclass(frozen=True, kw_only=True)
class SpectralSphereRule(MuonSphereRule):
    """SSO, algorithm 1 of the paper: retract, then step along `msign(M + lambda u v^T)`."""

    tolerance: float | None = None
    """Largest |<u v^T, direction>| that counts as tangent; null: 2e-4, or 1e-3 with msign_dtype
    float16. With bfloat16, which cannot tell less than 5e-3, it must be given. In 16 bits what
    rounding puts along u v^T is taken out, up to 0.05 in float16 and 0.1 in bfloat16: more than
    that is a miss, whatever the tolerance."""
    max_evaluations: int | None = None
    """Largest number of msign evaluations per unit and step; null: 1, or 8 with early exit. Without
    early exit all of them run."""
    early_exit: bool | None = None
    """Stop when all units have converged, which waits for the device; null: on a CPU only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        tolerance_for(self.dtype or torch.float32, self.tolerance)
        require(
            self.max_evaluations is None or self.max_evaluations >= 1,
            f"max_evaluations must be at least 1, got {self.max_evaluations}",
        )

    def init_state(self, weight: Tensor) -> State:
        """Create momentum, u, v, nearby, and the last multiplier and slope `[batch]`."""
        state = super().init_state(weight)
        state["multiplier"] = weight.new_zeros(weight.shape[0])
        state["slope"] = weight.new_zeros(weight.shape[0])
        return state

    def update_units(
        self,
        weight: Tensor,
        momentum: Tensor,
        state: State,
        lr: Rate,
        weight_decay: Rate,
        active: Tensor | None,
    ) -> Report:
        """Decay, retract and step along the tangent direction; see `MuonRule.update_units`.

        Reports what MuonSphere does, and what `TangentSolution.report` says of the solve.
        """
        decay_(weight, lr, weight_decay, active)
        momentum = normalize_(momentum.to(torch.promote_types(momentum.dtype, torch.float32)))
        (report,), sound, factor = self.track([Stack(weight, momentum, state, lr)], active)
        scale_([weight], factor)
        polar, solved = self.keep(self.solve(momentum, state), state, sound, active)
        return report | self.apply(weight, polar, lr, active, copy=state.get(COPY)) | solved

    def update_joined(
        self, stacks: Sequence[Stack], weight_decay: Rate, active: Tensor | None
    ) -> list[Report]:
        """Decay and retract stacks, solve and step; see `MuonRule.update_joined`."""
        for stack in stacks:
            decay_(stack.weight, stack.lr, weight_decay, active)
        reports, sound, factor = self.track(stacks, active)
        momenta = [
            normalize_(stack.grad.to(torch.promote_types(stack.grad.dtype, torch.float32)))
            for stack in stacks
        ]
        states = [stack.state for stack in stacks]
        solutions = self.solve_many(momenta, states)
        kept = [
            self.keep(solution, state, each, active)
            for solution, state, each in zip(solutions, states, apart(sound, momenta), strict=True)
        ]
        polars = [polar for polar, _ in kept]
        others = self.apply_many(stacks, polars, active, scale=factor)
        figures = (figures for _, figures in kept)
        return [a | b | c for a, b, c in zip(reports, others, figures, strict=True)]

    def keep(
        self, solution: TangentSolution, state: State, sound: Tensor, active: Tensor | None
    ) -> tuple[Polar, Report]:
        """Return the direction of each unit and the report of its solve; keeps multiplier and slope
        of those that are `sound` `[batch]` and take their step."""
        polar = Polar(solution.direction, solution.bounded & sound)
        gate = taken(active, polar.bounded)
        for name, new in (("multiplier", solution.multiplier), ("slope", solution.slope)):
            torch.where(gate, new.to(state[name].dtype), state[name], out=state[name])
        return polar, solution.report(state["multiplier"].dtype)

    def settings(self) -> dict[str, Any]:
        """Return the fields, with the tolerance of a solve; see `Rule.settings`."""
        return super().settings() | {"tolerance": self.solver_tolerance}

    @property
    def solver_tolerance(self) -> float:
        """The tolerance of a solve, the default filled in."""
        return tolerance_for(self.dtype or torch.float32, self.tolerance)

    @property
    def sync_field(self) -> str | None:
        """Name of the field that makes a step wait for a GPU; see `Rule.sync_field`."""
        return "early_exit" if self.early_exit else None

    def matrix_cost(self, short: int, long: int, product: Product) -> float:
        """Count the FLOPs of the singular triplet and of the solve; see `Rule.matrix_cost`.

        With `early_exit` null all evaluations count, as on a GPU.
        """
        evaluations = float(self.max_evaluations or EVALUATIONS)
        if self.early_exit:
            evaluations = MEAN_EARLY_EXIT_EVALUATIONS
        msign = self.msign_cost(short, long, product)
        return self.track_cost(short, long, product) + tangent_cost(
            short, long, evaluations=evaluations, msign=msign, product=product,
            dtype=self.dtype or torch.float32,
        )  # fmt: skip

    def solve(self, momentum: Tensor, state: State) -> TangentSolution:
        """Find the multiplier and direction, in the buffer of the normalised `momentum`."""
        (solution,) = self.solve_many([momentum], [state])
        return solution

    def solve_many(
        self, momenta: Sequence[Tensor], states: Sequence[State]
    ) -> list[TangentSolution]:
        """Do `solve` for stacks with equal shorter sides, together."""
        early = momenta[0].device.type == "cpu" if self.early_exit is None else self.early_exit
        limit = EARLY_EXIT_EVALUATIONS if early else EVALUATIONS
        return solve_multipliers(
            [
                TangentProblem(m, state["u"].to(m.dtype), state["v"].to(m.dtype))
                for m, state in zip(momenta, states, strict=True)
            ],
            tolerance=self.solver_tolerance,
            max_evaluations=limit if self.max_evaluations is None else self.max_evaluations,
            early_exit=early,
            schedule=self.schedule,
            steps=self.steps,
            dtype=self.dtype,
            overwrite=True,
        )
