"""Spectral gradient descent: the nuclear-norm step, without memory.

Source: "When do spectral gradient updates help in deep learning?". For a loss with curvature bound
L in the spectral norm the steepest descent step of a matrix is -(||G||_* / L) polar(G), which
decreases it by at least ||G||_*^2 / (2 L); of a vector with the bound in the maximum norm it is
-(||g||_1 / L) sign(g). For mean((W A - Y)^2) / 2 over n samples, L = ||A||_F^2 / n. The learning
rate is 1 / L.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from spectral.polar import Polar, polar_
from spectral.rules.base import (
    DTYPES,
    Report,
    Rule,
    State,
    decay_,
    refused,
    require,
    require_choice,
    subtract_,
    taken,
)
from spectral.schedules import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class SpectralDescentRule(Rule):
    """W - lr ||G||_* polar(G) on whole matrices, g - lr ||g||_1 sign(g) on whole vectors."""

    whole_matrix: ClassVar[bool] = True
    takes_vectors: ClassVar[bool] = True

    schedule: str = "polar_express"
    """Polynomial set of msign, a key of `spectral.schedules.SCHEDULES`."""
    steps: int = 8
    """Steps of msign, at least 1."""
    msign_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the products inside msign; null keeps that of the weight."""

    def __post_init__(self) -> None:
        require_choice("schedule", self.schedule, tuple(SCHEDULES))
        require(self.steps >= 1, f"steps must be at least 1, got {self.steps}")
        require_choice("msign_dtype", self.msign_dtype, (None, *DTYPES))

    def init_state(self, weight: Tensor) -> State:
        """Nothing to remember; ValueError unless `[batch, rows, cols]` or `[batch, n]`."""
        require(
            weight.ndim in (2, 3),
            "SpectralDescentRule needs whole matrices [batch, rows, cols] or vectors [batch, n], "
            f"got shape {tuple(weight.shape)}",
        )
        return {}

    @torch.no_grad()
    def update(
        self,
        weight: Tensor,
        momentum: Tensor,
        state: State,
        *,
        lr: float | Tensor,
        weight_decay: float | Tensor,
        active: Tensor | None,
    ) -> Report:
        """dual_norm (||G||_* or ||g||_1), update_rms and refused; see `Rule.update`.

        The nuclear norm is <G, msign(G)>: what the step, with the polar factor it has, is worth.
        """
        direction, sound = self.direction(momentum)
        dual_norm = (momentum * direction).flatten(1).sum(1)
        direction.mul_(dual_norm.view(-1, *(1,) * (weight.ndim - 1)))
        rms = direction.flatten(1).square().mean(1).sqrt()
        # The step is as long as the gradient is large; its square must be a number.
        sound = sound & rms.isfinite()
        gate = taken(active, sound)
        decay_(weight, lr, weight_decay, gate)
        subtract_(weight, direction, lr, gate)
        return {
            "dual_norm": torch.where(sound, dual_norm, 0),
            "update_rms": torch.where(sound, rms, 0),
            "refused": refused(active, sound),
        }

    def direction(self, grad: Tensor) -> Polar:
        """The unit step of each matrix (polar factor) or vector (signs), in a buffer of its own."""
        if grad.ndim == 2:
            return Polar(grad.sign(), torch.isfinite(grad.sum(1)))
        dtype = None if self.msign_dtype is None else DTYPES[self.msign_dtype]
        return polar_(grad.clone(), schedule=self.schedule, steps=self.steps, dtype=dtype)
