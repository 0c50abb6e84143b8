"""A rule that steps each matrix either by a spectral rule or by an elementwise one.

"When do spectral gradient updates help in deep learning?" predicts that a spectral step decreases
the loss more where nr(G) >= st(A): the nuclear rank of the gradient against the stable rank of what
the weight multiplies. `observe_` takes that ratio when it is measured; the smoothed ratio, with
hysteresis, decides which rule steps a matrix. Both rules are computed and keep their state up to
date in every step, so that a switch finds a current momentum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..cost import Product, product_flops
from .base import Rate, Report, Rule, State, require, require_fraction


@dataclass(frozen=True, kw_only=True)
class SwitchedRule(Rule):
    """Step each matrix by `spectral` or by `elementwise`."""

    whole_matrix: ClassVar[bool] = True

    spectral: Rule
    """A whole-matrix rule, with which every matrix begins."""
    elementwise: Rule
    """An elementwise rule."""
    lr_ratio: float
    """Learning rate of `elementwise` over that of `spectral`; positive."""
    elementwise_weight_decay: float = 0.0
    """Decoupled weight decay under `elementwise`."""
    smoothing: float = 0.9
    """Weight of earlier measurements in the mean of the ratio's logarithm, in [0, 1)."""
    hysteresis: float = 0.1
    """A matrix changes to the spectral rule at a ratio of 1 + this, and back at 1 / (1 + this)."""

    def __post_init__(self) -> None:
        require(self.spectral.whole_matrix, "spectral must be a rule of whole matrices")
        require(not self.elementwise.whole_matrix, "elementwise must be an elementwise rule")
        require(self.lr_ratio > 0, f"lr_ratio must be positive, got {self.lr_ratio}")
        require_fraction("smoothing", self.smoothing)
        require(self.hysteresis >= 0, f"hysteresis must not be negative, got {self.hysteresis}")

    def init_state(self, weight: Tensor) -> State:
        """Create the states of both rules and what the choice needs, `[batch]` each.

        on_spectral is 1 or 0, criterion the smoothed logarithm of the ratio, and measured the
        number of measurements.
        """
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
        lr: Rate,
        weight_decay: Rate,
        active: Tensor | None,
    ) -> Report:
        """Step by both rules and keep the result of the chosen one; see `Rule.update`.

        Reports what the spectral rule does, with update_rms of the chosen rule, on_spectral, and
        criterion, the smoothed ratio.
        """
        other, gradient = weight.clone(), momentum.clone()
        plain = self.elementwise.step(
            other,
            gradient,
            of_rule(state, "elementwise_"),
            lr=lr * self.lr_ratio,
            weight_decay=self.elementwise_weight_decay,
            active=active,
        )
        plain |= self.elementwise.figures(of_rule(state, "elementwise_"))
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

    @property
    def recreated(self) -> tuple[str, ...]:
        """What the spectral rule creates again; see `Rule.recreated`."""
        return tuple(f"spectral_{name}" for name in self.spectral.recreated)

    def radius_of(self, shape: tuple[int, int]) -> float | None:
        """Return the radius under the spectral rule; see `Rule.radius_of`."""
        return self.spectral.radius_of(shape)

    def scale_of(self, shape: tuple[int, int]) -> float | None:
        """Return the scale under the spectral rule; see `Rule.scale_of`."""
        return self.spectral.scale_of(shape)

    @property
    def sync_field(self) -> str | None:
        """Name of the field of either rule that makes it wait; see `Rule.sync_field`."""
        return self.spectral.sync_field or self.elementwise.sync_field

    def cost(self, shape: Sequence[int], *, product: Product = product_flops) -> float:
        """Count the FLOPs of both rules, which are both computed; see `Rule.cost`."""
        return self.spectral.cost(shape, product=product) + self.elementwise.cost(shape)

    def route(
        self, batch: int, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device
    ) -> str | None:
        """Describe the kernels of the spectral rule; see `Rule.route`."""
        return self.spectral.route(batch, shape, dtype=dtype, device=device)

    def on_spectral(self, state: State) -> Tensor:
        """Return `[batch]`, 1 for units that the spectral rule steps; see `Rule.on_spectral`."""
        return state["on_spectral"]

    def rates(self, lr: float, weight_decay: float, *, on_spectral: bool) -> tuple[float, float]:
        """Return the learning rate and weight decay of the chosen rule; see `Rule.rates`."""
        if on_spectral:
            return lr, weight_decay
        return lr * self.lr_ratio, self.elementwise_weight_decay

    @torch.no_grad()
    def observe_(self, state: State, ratio: Tensor) -> None:
        """Take newly measured nr(G) / st(A) `[batch]` and decide for the following steps.

        NaN stands for no measurement. `ratio` may be on another device than the state.
        """
        new = ratio.to(state["criterion"]).log()
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
    """Return the entries of one of the two rules, under that rule's own names."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
