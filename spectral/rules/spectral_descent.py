"""Spectral gradient descent: updates scaled by the nuclear norm, without momentum.

Source: "When do spectral gradient updates help in deep learning?" (arXiv 2512.04299). For a loss
with curvature bounded by L in the spectral norm, the steepest descent step on a matrix is
-(||G||_* / L) polar(G), which decreases the loss by at least ||G||_*^2 / (2 L). On a vector, with
curvature bounded by L in the maximum norm, the step is -(||g||_1 / L) sign(g). For
mean((W A - Y)^2) / 2 over n samples, L = ||A||_F^2 / n. The learning rate is 1 / L.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..polar import Polar, coefficients, newton_schulz
from .base import Report, Stack, State, decay_, refused, require, subtract_, taken
from .muon import MsignRule


@dataclass(frozen=True, kw_only=True)
class SpectralDescentRule(MsignRule):
    """W - lr ||G||_* polar(G) on whole matrices, w - lr ||g||_1 sign(g) on whole vectors."""

    def init_state(self, weight: Tensor) -> State:
        """Return an empty state.

        Raises:
            ValueError: if `weight` is neither `[batch, rows, cols]` nor `[batch, n]`.
        """
        require(
            weight.ndim in (2, 3),
            "SpectralDescentRule requires matrices [batch, rows, cols] or vectors [batch, n], "
            f"got shape {tuple(weight.shape)}",
        )
        return {}

    def update(self, stacks: Sequence[Stack]) -> list[Report]:
        """Decay and update the weights. See `Rule.update`.

        Reports `dual_norm` (||G||_* or ||g||_1), `update_rms` and `refused`. The nuclear norm is
        computed as <G, msign(G)> with the step's approximate polar factor, so the square of the
        reported norm is exactly the loss's first-order decrease divided by lr.
        """
        return [self._step(stack) for stack in stacks]

    def _step(self, stack: Stack) -> Report:
        weight, momentum, _, (lr, weight_decay, active) = stack
        direction, sound = self.direction(momentum)
        dual_norm = (momentum * direction).flatten(1).sum(1)
        # Step size is proportional to the gradient's norm, which must therefore be finite.
        norm = dual_norm.abs() * torch.linalg.vector_norm(direction.flatten(1), dim=1)
        sound = sound & norm.isfinite()
        direction.mul_(dual_norm.view(-1, *(1,) * (weight.ndim - 1)))
        rms = norm / math.sqrt(weight[0].numel())
        gate = taken(active, sound)
        decay_(weight, lr, weight_decay, gate)
        subtract_(weight, direction, lr, gate)
        return {
            "dual_norm": torch.where(sound, dual_norm, 0),
            "update_rms": torch.where(sound, rms, 0),
            "refused": refused(active, sound),
        }

    def direction(self, grad: Tensor) -> Polar:
        """Return each matrix's polar factor, or each vector's signs, as a new tensor."""
        if grad.ndim == 2:
            return Polar(grad.sign(), torch.isfinite(grad.sum(1)))
        (polar,) = self.polars([grad.clone()])
        return polar._replace(direction=polar.direction.to(grad.dtype))


def reference(
    rule: SpectralDescentRule,
    weight: Tensor,  # [rows, cols]
    grad: Tensor,  # [rows, cols]
    state: State,  # empty
    lr: float,
    weight_decay: float,
) -> tuple[Tensor, State]:
    """Update one matrix with spectral descent in plain code, as `SpectralDescentRule` does.

    Source: "When do spectral gradient updates help in deep learning?" (arXiv 2512.04299), with
    lr = 1 / L.
    """
    W, G = weight, grad
    Phi = newton_schulz(G, coefficients(rule.schedule, rule.steps, W.dtype))  # polar(G)
    nuclear = (G * Phi).sum()  # ||G||_*
    return W * (1 - lr * weight_decay) - lr * nuclear * Phi, {}
