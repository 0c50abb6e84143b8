"""When the Gram penalty is active, and its metrics.

Source: "Learning in Transformers under Spectral Constraints", section 6, where it is active in the
first tenth of the steps. The schedules by measurement are in `training.control.penalty_triggers`.
"""

import math
from collections.abc import Mapping
from typing import Any

from parallel.comm.groups import Groups
from parallel.observe.gradient_noise import PenaltySamples
from parallel.optimizer.optimizer import DistributedOptimizer
from parallel.optimizer.penalty_gradient import PenaltyFigures
from training.config import Config
from training.config.sections.gram_penalty import GramPenaltyConfig
from training.control.penalty_triggers import switch


class GramPenalty:
    """The Gram penalty of one run, added to the gradient of each step in which it is active."""

    def __init__(
        self,
        section: GramPenaltyConfig,
        config: Config,
        groups: Groups,
        optimizer: DistributedOptimizer,
    ) -> None:
        self.section = section
        self.groups = groups
        self.optimizer = optimizer
        self.horizon = section.last_step(config.train.steps)
        self.log_interval = config.log.interval
        self.last = config.train.exit_step or config.train.steps
        self.microbatches = config.train.global_batch // (
            config.train.micro_batch * groups.data.size
        )
        self.switch = switch(section.adaptive)
        self._samples: PenaltySamples | None = None
        self._figures: PenaltyFigures | None = None
        self._top_share: float | None = None
        self._active = False
        self._switched = 0

    def reports(self, step: int) -> bool:
        """Return whether the penalty's metrics are logged after `step`, counted from 1.

        They are after the first step, to judge the coefficient by, after every logging step, and
        when the penalty was switched in the last step taken.
        """
        logged = step == 1 or step % self.log_interval == 0 or step == self.last
        return logged or self._switched != 0

    def before(self, index: int) -> None:
        """Prepare step `index`, counted from 0, before its forward pass."""
        self._samples, self._switched = None, 0
        if self._measures(index) and self.section.adaptive.measure == "top_share":
            assign = self.optimizer.domains[0].assign
            self._samples = PenaltySamples(
                self.optimizer.model,
                self.groups,
                lambda unit: assign(unit).penalty is not None,
                microbatches=self.microbatches,
                samples=self.section.adaptive.samples,
            )

    def add(self, index: int) -> None:
        """Add the penalty's gradient in step `index`, counted from 0, if it is active there.

        Waits for the device only in steps that are logged or measured.
        """
        measures = self._measures(index)
        fixed = self.section.schedule == "fixed"
        self._active = index < self.horizon and (self.switch.on or fixed)
        measured = measures or self.reports(index + 1)
        self._figures = None
        if self._samples is not None:
            self._top_share = self._samples.concentration()
            self._samples = None
        if self._active or measured:
            self._figures = self.optimizer.add_penalty(acts=self._active, measured=measured)
        if measures and self._figures is not None:
            on, share = self.switch.on, self._figures.share
            self.switch.measure(share if self._top_share is None else self._top_share)
            self._switched = self.switch.on - on

    def _measures(self, index: int) -> bool:
        """Whether step `index` measures what switches the penalty."""
        adaptive = self.section.schedule == "adaptive" and index < self.horizon
        return adaptive and index % self.section.adaptive.interval == 0

    def metrics(self, loss: float) -> dict[str, float]:
        """Return the metrics of the last step, of the weights before it; `loss` is its mean loss.

        penalty/on              1 if the penalty was active
        penalty/value           coefficient times the sum of the penalties, active or not
        penalty/loss_ratio      that value over the loss
        penalty/gradient_ratio  norm of its gradient over that of the loss, on penalised weights
        penalty/share           mean of ||OffDiag||_F^2 / ||W||_F^4
        penalty/top_share       last measurement, mean over units, if that switches the penalty
        penalty/level           what is compared with `on_above` and `off_below`, if adaptive
        penalty/switched        1 if it becomes active with the next step, -1 if it stops
        """
        found = self._figures
        if found is None:
            return {}
        metrics = {
            "penalty/on": float(self._active),
            "penalty/value": found.value,
            "penalty/loss_ratio": found.value / loss if loss else math.nan,
            "penalty/gradient_ratio": found.gradient_norm / found.loss_gradient_norm
            if found.loss_gradient_norm
            else math.nan,
            "penalty/share": found.share,
        }
        if self._top_share is not None:
            metrics["penalty/top_share"] = self._top_share
        if self.section.schedule == "adaptive" and self.switch.level is not None:
            metrics["penalty/level"] = self.switch.level
        if self._switched:
            metrics["penalty/switched"] = float(self._switched)
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {**self.switch.state(), "top_share": self._top_share}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        kept = dict(state)
        self._top_share = kept.pop("top_share")
        self.switch.restore(kept)
