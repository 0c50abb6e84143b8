"""When the Gram penalty acts, and what is logged of it.

Source: "Learning in Transformers under Spectral Constraints", section 6. The paper has it act in
the first tenth of the steps; `training.control.penalty_triggers` has the schedules that
measurements decide."""

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
    """The penalty of one run: added to the gradient of each step in which it acts."""

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
        self._acted = False
        self._switched = 0

    def reports(self, step: int) -> bool:
        """Whether the penalty's figures are logged after `step`, counted from 1: of the first, by
        which its coefficient is judged, of every logging step, and of the last that is over if the
        penalty was switched in it."""
        logged = step == 1 or step % self.log_interval == 0 or step == self.last
        return logged or self._switched != 0

    def before(self, index: int) -> None:
        """None; before the forward pass of step `index`, counted from 0."""
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
        """Add its gradient in step `index`, counted from 0, if it acts there. Waits for the
        device in steps that are logged or measured only."""
        measures = self._measures(index)
        fixed = self.section.schedule == "fixed"
        self._acted = index < self.horizon and (self.switch.on or fixed)
        measured = measures or self.reports(index + 1)
        self._figures = None
        if self._samples is not None:
            self._top_share = self._samples.concentration()
            self._samples = None
        if self._acted or measured:
            self._figures = self.optimizer.add_penalty(acts=self._acted, measured=measured)
        if measures and self._figures is not None:
            on, share = self.switch.on, self._figures.share
            self.switch.measure(share if self._top_share is None else self._top_share)
            self._switched = self.switch.on - on

    def _measures(self, index: int) -> bool:
        """Whether what switches it is measured in a step: within the horizon, every so often."""
        adaptive = self.section.schedule == "adaptive" and index < self.horizon
        return adaptive and index % self.section.adaptive.interval == 0

    def metrics(self, loss: float) -> dict[str, float]:
        """Figures of the last step, whose weights they are before it; `loss` is its mean loss.

        penalty/on              1 if it acted
        penalty/value           coefficient times the sum of the penalties, as it is or would be
        penalty/loss_ratio      the same over the loss
        penalty/gradient_ratio  norm of its gradient over that of the loss, on penalised weights
        penalty/share           mean of ||OffDiag||_F^2 / ||W||_F^4
        penalty/top_share       the last measured, mean over units, if it is what switches
        penalty/level           what is compared with `on` and `off`, if adaptive
        penalty/switched        1 or -1 if it acts or does not from the next step on
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
        if self._top_share is not None:
            metrics["penalty/top_share"] = self._top_share
        if self.section.schedule == "adaptive" and self.switch.level is not None:
            metrics["penalty/level"] = self.switch.level
        if self._switched:
            metrics["penalty/switched"] = float(self._switched)
        return metrics

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {**self.switch.state(), "top_share": self._top_share}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        kept = dict(state)
        self._top_share = kept.pop("top_share")
        self.switch.restore(kept)
