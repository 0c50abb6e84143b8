"""Switches of the Gram penalty: one number per measurement, compared with two bounds.

The paper proposes no schedule by measurement; both switches are our own.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from training.config.sections.gram_penalty import AdaptiveConfig

SMALLEST_START = 0.01
"""Smallest baseline of TopShare, which avoids dividing by a near-zero one."""


class Switch(ABC):
    """Switch that turns on when `level` exceeds the upper bound, off when it is below the lower."""

    def __init__(self, config: AdaptiveConfig) -> None:
        self.config = config
        self.on = False
        self.level: float | None = None

    def measure(self, value: float) -> None:
        """Take a measurement, and switch if it asks for that; a non-finite one is ignored."""
        if not math.isfinite(value):
            return
        self.level = self._follow(value)
        upper, lower = self.config.bounds
        if self.level is not None and self.level > upper:
            self.on = True
        elif self.level is not None and self.level < lower:
            self.on = False

    @abstractmethod
    def _follow(self, value: float) -> float | None:
        """Take a measurement and return the new level, None if there is none yet."""

    def _smooth(self, old: float, new: float) -> float:
        return self.config.smoothing * old + (1 - self.config.smoothing) * new

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {key: value for key, value in vars(self).items() if key != "config"}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        vars(self).update(state)


class GramGrowth(Switch):
    """Switch by the growth of the off-diagonal energy.

    `level` is the smoothed change of the logarithm of its share per measurement.
    """

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__(config)
        self.growth = 0.0
        self.log_share: float | None = None

    def _follow(self, value: float) -> float | None:
        log_share = math.log(max(value, 1e-300))  # 0 if every matrix is orthogonal or zero
        if self.log_share is not None:
            self.growth = self._smooth(self.growth, log_share - self.log_share)
        self.log_share = log_share
        return self.growth


class TopShareRise(Switch):
    """Switch by the rise of TopShare.

    `level` is the smoothed measurement over the baseline, the mean of the first `start` ones.
    """

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__(config)
        self.start = 0.0  # the baseline
        self.seen = 0
        self.smooth = 0.0

    def _follow(self, value: float) -> float | None:
        if self.seen < self.config.start:
            self.start += (value - self.start) / (self.seen + 1)
            self.seen += 1
            self.smooth = self.start
            return None
        self.smooth = self._smooth(self.smooth, value)
        return self.smooth / max(self.start, SMALLEST_START)


def switch(config: AdaptiveConfig) -> Switch:
    """Return the switch that `config.measure` names, turned off."""
    return GramGrowth(config) if config.measure == "gram" else TopShareRise(config)
