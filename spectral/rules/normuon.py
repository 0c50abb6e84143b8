"""NorMuon: Muon with a second moment per neuron (row) of the update.

Source: "NorMuon: Making Muon more efficient and scalable" (Li et al., 2025), algorithm 1. The rows
of msign(M) have very different norms. Each row is divided by its running RMS, so that all neurons
receive updates of similar size. The update keeps the Frobenius norm of msign(M).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..polar import Polar, coefficients, newton_schulz
from .base import Report, Stack, State, require_fraction, store_, taken
from .muon import MuonRule, momentum_of

EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True)
class NorMuonRule(MuonRule):
    """Muon with each row of the update divided by the row's RMS (moving average over steps)."""

    beta2: float = 0.95
    """Decay rate of the moving average of each update row's mean square, in [0, 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("beta2", self.beta2)

    def init_state(self, weight: Tensor) -> State:
        """Create the momentum and the mean squares `[batch, rows]`."""
        return super().init_state(weight) | {"square": weight.new_zeros(weight.shape[:2])}

    def update(self, stacks: Sequence[Stack]) -> list[Report]:
        """Decay the weights, then step along msign(momentum) with normalized rows. See
        `Rule.update`."""
        polars = self.polars([stack.grad for stack in stacks])
        even = [self._even(stack, polar) for stack, polar in zip(stacks, polars, strict=True)]
        return self.apply(stacks, even, decays=True)

    def _even(self, stack: Stack, polar: Polar) -> Polar:
        """Update a stack's mean squares, and return its normalized direction."""
        direction = polar.direction.to(stack.state["square"].dtype)
        square = stack.state["square"].view(*direction.shape[:2], -1)
        mean = torch.lerp(square, self.squares(direction), 1 - self.beta2)
        divided = direction / (mean.sqrt() + EPSILON)
        norm = torch.linalg.vector_norm(divided, dim=(1, 2))
        bounded = polar.bounded & norm.isfinite() & mean.isfinite().flatten(1).all(1)
        store_(square, mean, taken(stack.step.active, bounded))
        size = self.norm_of(direction) / norm.clamp_min(EPSILON)
        return Polar(divided.mul_(size[:, None, None]), bounded)

    def squares(self, direction: Tensor) -> Tensor:
        """Return the squares of `direction` `[batch, rows, cols]` to be averaged over steps."""
        return direction.square().mean(-1, keepdim=True)

    def norm_of(self, direction: Tensor) -> Tensor:
        """Return the Frobenius norms `[batch]` of the normalized directions."""
        norm: Tensor = torch.linalg.vector_norm(direction, dim=(1, 2))
        return norm

    def scale_of(self, shape: Sequence[int]) -> None:
        """Return None, because the update's spectral norm depends on the rows' mean squares."""


def reference(
    rule: NorMuonRule,
    weight: Tensor,  # [rows, cols]
    grad: Tensor,  # [rows, cols]
    state: State,  # momentum [rows, cols], square [rows]
    lr: float,
    weight_decay: float,
) -> tuple[Tensor, State]:
    """Update one matrix with NorMuon in plain code. `NorMuonRule` computes the same update.

    Source: "NorMuon: Making Muon more efficient and scalable" (Li et al., 2025), algorithm 1.
    """
    W = weight
    M, B = momentum_of(rule, grad, state)
    Phi = newton_schulz(B, coefficients(rule.schedule, rule.steps, W.dtype))  # msign(B)
    v = rule.beta2 * state["square"] + (1 - rule.beta2) * Phi.square().mean(1)  # per row
    D = Phi / (v.sqrt()[:, None] + EPSILON)
    D = rule.update_scale(W.shape) * Phi.norm() / D.norm() * D
    decays = W * D >= 0 if rule.cautious_decay else torch.ones_like(W)
    W = W - lr * weight_decay * decays * W
    return W - lr * D, {"momentum": M, "square": v}
