"""The Gram penalty's schedule and metrics.

Source: "Learning in Transformers under Spectral Constraints", section 6, where the penalty is
active in the first tenth of the steps.
"""

import math

from parallel.optimizer.distributed_optimizer import DistributedOptimizer
from parallel.optimizer.penalty_gradient import PenaltyFigures
from training.config import Config
from training.config.schema import GramPenaltyConfig


class GramPenalty:
    """The Gram penalty of one run, added to the gradients of its active steps."""

    def __init__(
        self, section: GramPenaltyConfig, config: Config, optimizer: DistributedOptimizer
    ) -> None:
        self.optimizer = optimizer
        self.horizon = section.last_step(config.train.steps)
        self.log_interval = config.log.interval
        self.last = config.train.last
        self._figures: PenaltyFigures | None = None
        self._active = False

    def reports(self, step: int) -> bool:
        """Return whether the penalty's metrics are logged after `step`, counted from 1.

        They are logged after the first step, to judge the coefficient, and after every logging
        step.
        """
        return step == 1 or step % self.log_interval == 0 or step == self.last

    def add(self, index: int) -> None:
        """Add the penalty's gradient in step `index`, counted from 0, if active.

        Waits for the device only in steps that are logged.
        """
        self._active, measured = index < self.horizon, self.reports(index + 1)
        self._figures = None
        if self._active or measured:
            self._figures = self.optimizer.add_penalty(enabled=self._active, measured=measured)

    def metrics(self, loss: float) -> dict[str, float]:
        """Return the last step's metrics, of the weights before it; `loss` is its mean loss.

        penalty/on              1 if the penalty was active
        penalty/value           coefficient times the sum of the penalties, active or not
        penalty/loss_ratio      penalty/value over the loss
        penalty/gradient_ratio  norm of the penalty's gradient over the norm of the loss's gradient,
                                on penalised weights
        penalty/share           mean of ||OffDiag||_F^2 / ||W||_F^4
        """
        figures = self._figures
        if figures is None:
            return {}
        loss_norm = figures.loss_gradient_norm
        return {
            "penalty/on": float(self._active),
            "penalty/value": figures.value,
            "penalty/loss_ratio": figures.value / loss if loss else math.nan,
            "penalty/gradient_ratio": figures.gradient_norm / loss_norm if loss_norm else math.nan,
            "penalty/share": figures.share,
        }
