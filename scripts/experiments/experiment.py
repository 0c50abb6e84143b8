"""The interface between the runner and an experiment.

The module of an experiment contains a docstring that states the paper's claim, `SMALL` (the sizes
of a test) and `experiment(draws, ...)`, whose defaults are the paper's sizes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Lines = Mapping[str, Sequence[float] | Mapping[Any, float]]
"""Values of lines by label: a list, or a mapping from x to y."""


class Draws:
    """Random numbers of a seed, in float64 unless stated otherwise."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Independent standard normal entries."""
        return torch.randn(*shape, generator=self.generator, dtype=dtype)

    def restarted(self, offset: int = 0) -> "Draws":
        """Return a new generator with this or another seed."""
        return Draws(self.seed + offset)


@dataclass(frozen=True)
class Check:
    """A measured number and its expected range.

    `source` states where the range comes from: a paper's statement, theory, or `recorded`. Recorded
    numbers come from an earlier run of the paper's setting with exact decompositions in float64.
    """

    name: str
    measured: float
    low: float
    high: float
    source: str
    series: str = ""
    """Checks of the same series share a line of the printed table."""

    @property
    def passed(self) -> bool:
        """Whether the number is in its range; NaN is not."""
        return self.low <= self.measured <= self.high


def near(
    name: str, measured: float, expected: float, relative: float, source: str, series: str = ""
) -> Check:
    """Check that `measured` is within a fraction `relative` of `expected`."""
    slack = relative * abs(expected)
    return Check(name, measured, expected - slack, expected + slack, source, series)


def at_least(name: str, measured: float, low: float, source: str) -> Check:
    """Check that `measured` is `low` or more."""
    return Check(name, measured, low, math.inf, source)


def at_most(name: str, measured: float, high: float, source: str, series: str = "") -> Check:
    """Check that `measured` is `high` or less."""
    return Check(name, measured, -math.inf, high, source, series)


@dataclass(frozen=True)
class Panel:
    """A part of a figure: lines, dashed lines and dots; the lines of each kind start with the first
    color.

    `log` names the logarithmic axes; `levels` contains the heights of horizontal lines.
    """

    title: str
    lines: Lines = field(default_factory=dict)
    dashed: Lines = field(default_factory=dict)
    dots: Lines = field(default_factory=dict)
    x: str = "step"
    y: str = ""
    log: str = ""
    levels: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The result of an experiment: checks that must hold for every seed and size, a figure, and
    `data`.

    recorded.yaml contains `data` of the paper's setting, for comparison.
    """

    checks: Sequence[Check]
    data: Mapping[str, Any]
    panels: Sequence[Panel]
