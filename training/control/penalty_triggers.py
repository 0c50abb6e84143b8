"""What switches the Gram penalty on and off: one number per measurement, compared with two bounds.

The paper leaves a schedule by online measurement open; both switches here are ours.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from training.config.sections.gram_penalty import AdaptiveConfig

SMALLEST_START = 0.01
"""Of TopShare: a smaller start counts as this, so that no ratio to next to nothing decides."""


class Switch(ABC):
    """On from where `level` rises above the upper bound to where it falls below the lower."""

    def __init__(self, config: AdaptiveConfig) -> None:
        self.config = config
        self.on = False
        self.level: float | None = None

    def measure(self, value: float) -> None:
        """Take one more measurement. One that is not finite decides nothing."""
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
        """What is compared with the bounds after one more measurement, None if there is nothing
        yet."""

    def _smooth(self, old: float, new: float) -> float:
        return self.config.smoothing * old + (1 - self.config.smoothing) * new

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {key: value for key, value in vars(self).items() if key != "config"}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        vars(self).update(state)


class GramGrowth(Switch):
    """On while the measured share of off-diagonal energy grows: `level` is the smoothed growth of
    its logarithm per measurement."""

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
    """On while TopShare is elevated: `level` is the smoothed measurement over the mean of the first
    `start`, after which it begins."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__(config)
        self.start = 0.0  # the mean of those seen
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
    """The switch by what `config.measure` says, off."""
    return GramGrowth(config) if config.measure == "gram" else TopShareRise(config)
