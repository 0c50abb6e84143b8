"""The Spectral Sphere Optimizer: steepest descent tangent to `||W||_2 = R` (SSO paper)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from spectral.polar import Polar, normalize_
from spectral.rules.base import COPY, Report, State, decay_, require, taken
from spectral.rules.muon_sphere import MuonSphereRule
from spectral.tangent import TangentSolution, solve_multiplier

EARLY_EXIT_EVALUATIONS = 8
FIXED_EVALUATIONS = 3


@dataclass(frozen=True, kw_only=True)
class SpectralSphereRule(MuonSphereRule):
    """SSO, algorithm 1 of the paper: retract, then step along `msign(M + lambda u v^T)`."""

    ends_in_product: ClassVar[bool] = False  # which of several directions is known at the end

    tolerance: float = 2e-4
    """Largest |<u v^T, direction>| that counts as tangent; positive."""
    max_evaluations: int | None = None
    """msign evaluations per unit and step; null: 3 executed ones, or, with early exit, up to 8 (up
    to 3 in half precision, whose own error hides what more would gain)."""
    early_exit: bool | None = None
    """Stop when all have converged, which waits for the device; null: on CPU only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tolerance > 0, f"tolerance must be positive, got {self.tolerance}")
        require(
            self.max_evaluations is None or self.max_evaluations >= 1,
            f"max_evaluations must be at least 1, got {self.max_evaluations}",
        )

    def init_state(self, weight: Tensor) -> State:
        """Momentum, u, v, and the last multiplier and slope `[batch]`."""
        state = super().init_state(weight)
        state["multiplier"] = weight.new_zeros(weight.shape[0])
        state["slope"] = weight.new_zeros(weight.shape[0])
        return state

    def update_units(
        self,
        weight: Tensor,
        momentum: Tensor,
        state: State,
        lr: float | Tensor,
        weight_decay: float | Tensor,
        active: Tensor | None,
    ) -> Report:
        """The figures of MuonSphere and of the solve; see `MuonRule.update_units`."""
        decay_(weight, lr, weight_decay, active)
        momentum = normalize_(momentum.to(torch.promote_types(momentum.dtype, torch.float32)))
        report, sound = self.retract(weight, state, lr, active)
        solution = self.solve(momentum, state)
        polar = Polar(solution.direction, solution.bounded & sound)
        gate = taken(active, polar.bounded)
        for name, new in (("multiplier", solution.multiplier), ("slope", solution.slope)):
            state[name].copy_(torch.where(gate, new, state[name]))
        report |= self.apply(weight, polar, lr, active, copy=state.get(COPY))
        return report | {
            "multiplier": solution.multiplier,
            "residual": solution.residual,
            "evaluations": solution.evaluations.to(weight.dtype),
            "converged": solution.converged.to(weight.dtype),
        }

    def solve(self, momentum: Tensor, state: State) -> TangentSolution:
        """The multiplier and direction, in the buffer of the normalised `momentum`."""
        early = momentum.device.type == "cpu" if self.early_exit is None else self.early_exit
        # Half precision evaluates f with an error above any useful tolerance: no point in a chase.
        exact = early and self.msign_dtype in (None, "float32")
        limit = EARLY_EXIT_EVALUATIONS if exact else FIXED_EVALUATIONS
        return solve_multiplier(
            momentum,
            state["u"].to(momentum.dtype),
            state["v"].to(momentum.dtype),
            tolerance=self.tolerance,
            max_evaluations=limit if self.max_evaluations is None else self.max_evaluations,
            early_exit=early,
            schedule=self.schedule,
            steps=self.steps,
            dtype=self.dtype,
            overwrite=True,
        )
