"""AdaMuon: Muon applied to the signs of the momentum, with a per-entry second moment of the update.

Source: "AdaMuon: Adaptive Muon Optimizer" (Si, Zhang and Shen, 2025), algorithm 1. With
O = msign(sign(M)), the moving average V of O's squares, and O' = O / (sqrt(V) + epsilon), the step
is `W -= lr s sqrt(min(rows, cols)) O' / ||O'||`. With scale `align_adam_rms`, the update has an RMS
of 0.2 lr.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..polar import coefficients, newton_schulz
from ..sphere import Scale
from .base import Report, Stack, State
from .muon import momentum_of
from .normuon import EPSILON, NorMuonRule


@dataclass(frozen=True, kw_only=True)
class AdaMuonRule(NorMuonRule):
    """Muon applied to the signs of the momentum, with update entries divided by a running RMS."""

    scale: Scale = "align_adam_rms"
    """Formula for the shape-dependent update scale (docs/spectral.md); the default is the paper's
    formula."""
    beta2: float = 0.95
    """Decay rate of the moving average of the update's squared entries, in [0, 1); the paper sets
    it to `momentum`."""

    def init_state(self, weight: Tensor) -> State:
        """Create the momentum and the mean squares, both with the shape of `weight`."""
        return super().init_state(weight) | {"square": torch.zeros_like(weight)}

    def update(self, stacks: Sequence[Stack]) -> list[Report]:
        """Decay the weights, then step along the normalized msign(sign(momentum)). See
        `Rule.update`."""
        # `sign` would hide infinities and NaN, which must not go undetected.
        signs = [torch.where(s.grad.isfinite(), s.grad.sign(), torch.nan) for s in stacks]
        return super().update([s._replace(grad=x) for s, x in zip(stacks, signs, strict=True)])

    def squares(self, direction: Tensor) -> Tensor:
        """Return the squared entries."""
        return direction.square()

    def norm_of(self, direction: Tensor) -> Tensor:
        """Return the Frobenius norms `[batch]` of exact polar factors."""
        return direction.new_full(direction.shape[:1], math.sqrt(min(direction.shape[1:])))


def reference(
    rule: AdaMuonRule,
    weight: Tensor,  # [rows, cols]
    grad: Tensor,  # [rows, cols]
    state: State,  # momentum and square [rows, cols]
    lr: float,
    weight_decay: float,
) -> tuple[Tensor, State]:
    """Update one matrix with AdaMuon in plain code. `AdaMuonRule` computes the same update.

    Source: "AdaMuon: Adaptive Muon Optimizer" (Si, Zhang and Shen, 2025), algorithm 1.
    """
    W = weight
    M, B = momentum_of(rule, grad, state)
    Phi = newton_schulz(B.sign(), coefficients(rule.schedule, rule.steps, W.dtype))
    V = rule.beta2 * state["square"] + (1 - rule.beta2) * Phi.square()
    D = Phi / (V.sqrt() + EPSILON)
    D = rule.update_scale(W.shape) * math.sqrt(min(W.shape)) / D.norm() * D
    decays = W * D >= 0 if rule.cautious_decay else torch.ones_like(W)
    W = W - lr * weight_decay * decays * W
    return W - lr * D, {"momentum": M, "square": V}
