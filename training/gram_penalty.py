"""When the Gram penalty acts, and what is logged of it.

Source: "Learning in Transformers under Spectral Constraints", section 6. The paper has it act in
the first tenth of the steps and leaves a schedule by online measurement open; `adaptive` is ours.
"""

import math
from collections.abc import Mapping
from typing import Any

from parallel.optimizer import DistributedOptimizer
from parallel.penalty import PenaltyFigures
from training.config import Config
from training.config_penalty import AdaptiveConfig, GramPenaltyConfig


class Switch:
    """Switched on while what is measured grows, off when it no longer does."""

    def __init__(self, config: AdaptiveConfig) -> None:
        self.config = config
        self.on = False
        self.growth = 0.0
        self._log_share: float | None = None

    def measure(self, share: float) -> None:
        """None; takes one more measurement, positive unless every matrix is orthogonal or zero."""
        log_share = math.log(max(share, 1e-300))
        if self._log_share is not None:
            kept = self.config.smoothing
            self.growth = kept * self.growth + (1 - kept) * (log_share - self._log_share)
        self._log_share = log_share
        if self.growth > self.config.on:
            self.on = True
        elif self.growth < self.config.off:
            self.on = False

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"on": self.on, "growth": self.growth, "log_share": self._log_share}

    def restore(self, state: Mapping[str, Any]) -> None:
        """None; goes on from what `state` gave."""
        self.on, self.growth = state["on"], state["growth"]
        self._log_share = state["log_share"]


class GramPenalty:
    """The penalty of one run: added to the gradient of each step in which it acts."""

    def __init__(
        self, section: GramPenaltyConfig, config: Config, optimizer: DistributedOptimizer
    ) -> None:
        self.section = section
        self.optimizer = optimizer
        self.horizon = section.last_step(config.train.steps)
        self.log_interval = config.log.interval
        self.last = config.train.exit_step or config.train.steps
        self.switch = Switch(section.adaptive)
        self._figures: PenaltyFigures | None = None
        self._acted = False

    def reports(self, step: int) -> bool:
        """Whether the penalty's figures are logged after `step`, counted from 1: of the first, by
        which its coefficient is judged, and of every logging step."""
        return step == 1 or step % self.log_interval == 0 or step == self.last

    def add(self, index: int) -> None:
        """None; adds its gradient in step `index`, counted from 0, if it acts there. Waits for the
        device in steps that are logged or measured only."""
        adaptive = self.section.schedule == "adaptive"
        within = index < self.horizon
        switching = within and adaptive and index % self.section.adaptive.interval == 0
        acts = within and (self.switch.on or not adaptive)
        reported = self.reports(index + 1)
        self._acted, self._figures = acts, None
        if acts or switching or reported:
            measured = switching or reported
            self._figures = self.optimizer.add_penalty(acts=acts, measured=measured)
        if switching and self._figures is not None:
            self.switch.measure(self._figures.share)

    def metrics(self, loss: float) -> dict[str, float]:
        """Figures of the last step, whose weights they are before it; `loss` is its mean loss.

        penalty/on              1 if it acted
        penalty/value           coefficient times the sum of the penalties, as it is or would be
        penalty/loss_ratio      the same over the loss
        penalty/gradient_ratio  norm of its gradient over that of the loss, on penalised weights
        penalty/share           mean of ||OffDiag||_F^2 / ||W||_F^4
        penalty/growth          smoothed growth of the share per measurement, if adaptive
        """
        found = self._figures
        if found is None:
            return {}
        metrics = {
            "penalty/on": float(self._acted),
            "penalty/value": found.value,
            "penalty/loss_ratio": found.value / loss if loss else math.nan,
            "penalty/gradient_ratio": found.gradient_norm / found.loss_gradient_norm
            if found.loss_gradient_norm
            else math.nan,
            "penalty/share": found.share,
        }
        if self.section.schedule == "adaptive":
            metrics["penalty/growth"] = self.switch.growth
        return metrics

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return self.switch.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """None; goes on from what `state` gave."""
        self.switch.restore(state)
