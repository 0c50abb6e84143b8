"""A spectral and an elementwise rule for the same matrices, of which each takes one at a time.

"When do spectral gradient updates help in deep learning?" predicts the spectral step to decrease
the loss more where nr(G) >= st(A): the nuclear rank of the gradient against the stable rank of what
the weight multiplies. `observe_` takes that ratio when it is measured; the smoothed ratio, with
hysteresis, says which rule a matrix takes its steps from. Both rules keep their state up to date on
every step, so that a switch finds warm momentum, and both are computed.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from spectral.rules.base import Report, Rule, State, require, require_fraction


@dataclass(frozen=True, kw_only=True)
class SwitchedRule(Rule):
    """Steps each matrix by `spectral` or by `elementwise`."""

    whole_matrix: ClassVar[bool] = True

    spectral: Rule
    """A whole-matrix rule, the one that every matrix begins with."""
    elementwise: Rule
    """An elementwise rule."""
    lr_ratio: float
    """Learning rate of `elementwise` over that of `spectral`; positive."""
    elementwise_weight_decay: float = 0.0
    """Decoupled weight decay under `elementwise`."""
    smoothing: float = 0.9
    """Weight of what was measured before in the mean of the ratio's logarithm, in [0, 1)."""
    hysteresis: float = 0.1
    """A matrix changes to the spectral rule at a ratio of 1 + this, and back at 1 / (1 + this)."""

    def __post_init__(self) -> None:
        require(self.spectral.whole_matrix, "spectral must be a rule of whole matrices")
        require(not self.elementwise.whole_matrix, "elementwise must be an elementwise rule")
        require(self.lr_ratio > 0, f"lr_ratio must be positive, got {self.lr_ratio}")
        require_fraction("smoothing", self.smoothing)
        require(self.hysteresis >= 0, f"hysteresis must not be negative, got {self.hysteresis}")

    def init_state(self, weight: Tensor) -> State:
        """The states of both rules, and `[batch]`: on_spectral (1 or 0), criterion (the smoothed
        logarithm of the ratio) and measured (how often it was)."""
        state = {f"spectral_{k}": v for k, v in self.spectral.init_state(weight).items()}
        state |= {f"elementwise_{k}": v for k, v in self.elementwise.init_state(weight).items()}
        state["on_spectral"] = weight.new_ones(weight.shape[0])
        state["criterion"] = weight.new_zeros(weight.shape[0])
        state["measured"] = weight.new_zeros(weight.shape[0])
        return state

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
        """The report of the spectral rule, with update_rms of the rule that was taken, on_spectral,
        and criterion, the smoothed ratio; see `Rule.update`."""
        other, gradient = weight.clone(), momentum.clone()
        plain = self.elementwise.step(
            other,
            gradient,
            of_rule(state, "elementwise_"),
            lr=lr * self.lr_ratio,
            weight_decay=self.elementwise_weight_decay,
            active=active,
        )
        own = of_rule(state, "spectral_")
        report = self.spectral.step(
            weight, momentum, own, lr=lr, weight_decay=weight_decay, active=active
        )
        on = state["on_spectral"] > 0
        weight.copy_(torch.where(on[:, None, None], weight, other))
        for name in ("update_rms", "refused"):
            report[name] = torch.where(on, report[name], plain[name])
        report["on_spectral"] = state["on_spectral"].clone()
        report["criterion"] = state["criterion"].exp()
        return report

    @torch.no_grad()
    def observe_(self, state: State, ratio: Tensor) -> None:
        """Take newly measured nr(G) / st(A) `[batch]`, NaN where there is none, and decides
        for the steps from now on."""
        new = ratio.to(state["criterion"].dtype).log()
        known = new.isfinite()
        old = torch.where(state["measured"] > 0, state["criterion"], new)
        smooth = torch.where(known, old.lerp(new, 1 - self.smoothing), state["criterion"])
        state["criterion"].copy_(smooth)
        state["measured"].add_(known)
        bound = math.log1p(self.hysteresis)
        on = torch.where(smooth <= -bound, 0, state["on_spectral"])
        on = torch.where(smooth >= bound, 1, on)
        state["on_spectral"].copy_(torch.where(known, on, state["on_spectral"]))


def of_rule(state: State, prefix: str) -> State:
    """The entries of one of the two rules, under that rule's own names."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
