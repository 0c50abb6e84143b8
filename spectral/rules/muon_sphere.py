"""MuonSphere: Muon with retraction to the spectral sphere, without tangency (SSO paper)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import scaling, sphere
from ..cost import Product, triplet_cost
from ..kernels.dispatch import device_name, small_problem
from ..power_iteration import basis_size, cold_start, top_singular
from .base import COPY, Rate, Report, State, decay_, require, require_choice, taken
from .muon import MuonRule, matrix_shape


@dataclass(frozen=True, kw_only=True)
class MuonSphereRule(MuonRule):
    """Muon whose weights are rescaled to spectral norm R before every update."""

    joins_shapes: ClassVar[bool] = False
    reads_weight: ClassVar[bool] = True

    radius: Literal["spectral_mup", "align_adam_rms", "spectral_kaiming"] = "spectral_mup"
    """How the radius R depends on the unit's shape; see `spectral.sphere.radius`."""
    radius_scaler: float = 1.0
    """The paper's c, a factor of the radius, not of the update; positive."""
    retraction: Literal["hard", "dynamic"] = "hard"
    """hard: rescale to R exactly. dynamic: multiply by `1 +- retraction_rate lr` towards R."""
    retraction_rate: float = 0.1
    """Rate of the dynamic retraction (the paper's lambda_wd); not negative."""
    power_iteration_steps: int = 10
    """Block Krylov steps per update from the last step's singular vectors, at least 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("radius", self.radius, scaling.MODES)
        require(self.radius_scaler > 0, f"radius_scaler must be positive, got {self.radius_scaler}")
        require_choice("retraction", self.retraction, ("hard", "dynamic"))
        require(
            self.retraction_rate >= 0,
            f"retraction_rate must not be negative, got {self.retraction_rate}",
        )
        require(
            self.power_iteration_steps >= 1,
            f"power_iteration_steps must be at least 1, got {self.power_iteration_steps}",
        )

    def init_state(self, weight: Tensor) -> State:
        """Create the momentum and the top singular vectors u `[batch, rows]`, v `[batch, cols]`."""
        state = super().init_state(weight)
        _, state["u"], state["v"] = cold_start(weight.detach())
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
        """Decay, retract and descend; see `MuonRule.update_units`.

        Reports `sigma` (before retraction), `radius`, `update_rms` and `refused`.
        """
        decay_(weight, lr, weight_decay, active)
        report, sound = self.retract(weight, state, lr, active)
        copy = state.get(COPY)
        return report | self.descend(weight, momentum, lr, active, copy=copy, sound=sound)

    def decay_problem(self, weight_decay: float) -> str | None:
        """Return why dynamic retraction takes no decay; see `Rule.decay_problem`."""
        if self.retraction == "hard" or not weight_decay > 0:
            return None
        return (
            "weight_decay must be 0 with retraction dynamic, as it shrinks a weight below the "
            f"sphere while the retraction lets it grow, got {weight_decay}"
        )

    def radius_of(self, shape: tuple[int, int]) -> float:
        """Return the radius R of a unit; see `Rule.radius_of`."""
        return sphere.radius(shape, self.radius, self.radius_scaler)

    def matrix_cost(self, short: int, long: int, product: Product) -> float:
        """Count the FLOPs of one msign and the top singular triplet; see `Rule.matrix_cost`."""
        track = triplet_cost(short, long, steps=self.power_iteration_steps, product=product)
        return self.msign_cost(short, long, product) + track

    def route(
        self, batch: int, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device
    ) -> str | None:
        """Describe what `MuonRule` does and how singular pairs are found; see `Rule.route`."""
        size = basis_size(min(shape), self.power_iteration_steps)
        reason = small_problem(size, device_name(device))
        pair = "kernel" if reason is None else f"library ({reason})"
        return f"{super().route(batch, shape, dtype=dtype, device=device)}; singular pair: {pair}"

    def sound(self, state: State, sigma: Tensor) -> Tensor:
        """Return whether the squares of a weight's norm and of its cached vectors are finite."""
        u, v = (torch.linalg.vector_norm(state[name], dim=-1) for name in ("u", "v"))
        return torch.addcmul(u + v, sigma, sigma) < float("inf")

    def retract(
        self, weight: Tensor, state: State, lr: Rate, active: Tensor | None
    ) -> tuple[Report, Tensor]:
        """Refresh u and v and move `weight` to the sphere; reports `sigma` and `radius`.

        Also returns whether each unit is sound `[batch]`. One that is not stays where it is and
        forgets its u and v, so that its next step starts cold.
        """
        sigma, u, v = top_singular(weight, state["u"], state["v"], steps=self.power_iteration_steps)
        sound = self.sound(state, sigma)
        unsound = ~sound[:, None]
        for name, new in (("u", u), ("v", v)):
            new = new.masked_fill_(unsound, 0).to(state[name].dtype)
            if active is None:
                state[name].copy_(new)
            else:
                torch.where(active, new, state[name], out=state[name])
        target = self.radius_of(matrix_shape(weight))
        gate = taken(active, sound)
        if self.retraction == "hard":
            sphere.retract_hard_(weight, sigma, target, active=gate)
        else:
            sphere.retract_dynamic_(
                weight, sigma, target, rate=self.retraction_rate, lr=lr, active=gate
            )
        return {"sigma": sigma, "radius": torch.full_like(sigma, target)}, sound
