"""The interface between the runner and an experiment.

An experiment is a function of `draws` and sizes, whose defaults are the paper's sizes. The first
paragraph of its docstring is the paper's claim.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Lines = Mapping[str, Sequence[float] | Mapping[Any, float]]
"""Lines by label: a list of values, or a mapping from x to y."""


class Draws:
    """A random number generator with a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return independent standard normal numbers."""
        return torch.randn(*shape, generator=self.generator, dtype=dtype)

    def restarted(self, offset: int = 0) -> "Draws":
        """Return a new generator with this seed plus `offset`."""
        return Draws(self.seed + offset)


@dataclass(frozen=True)
class Check:
    """A measured number and its expected range.

    `source` is the source of the range: a paper's statement, theory, or `recorded`. The latter is
    an earlier run of the paper's setting with exact decompositions in float64.
    """

    name: str
    measured: float
    low: float
    high: float
    source: str
    series: str = ""
    """Passed checks of the same series share one row of the printed table."""

    @property
    def passed(self) -> bool:
        """Whether the number is in its range (False for NaN)."""
        return self.low <= self.measured <= self.high


def near(
    name: str, measured: float, expected: float, relative: float, source: str, series: str = ""
) -> Check:
    """Return a check that `measured` is within a fraction `relative` of `expected`."""
    slack = relative * abs(expected)
    return Check(name, measured, expected - slack, expected + slack, source, series)


def at_least(name: str, measured: float, low: float, source: str) -> Check:
    """Return a check that `measured` is at least `low`."""
    return Check(name, measured, low, math.inf, source)


def at_most(name: str, measured: float, high: float, source: str, series: str = "") -> Check:
    """Return a check that `measured` is at most `high`."""
    return Check(name, measured, -math.inf, high, source, series)


@dataclass(frozen=True)
class Panel:
    """A panel of a figure with lines, dashed lines and dots. Each kind starts with the first color.

    `log` contains the names of logarithmic axes, "x", "y" or "xy". `levels` contains y values of
    horizontal lines by label.
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
    """The result of an experiment: checks, data, and the panels of a figure.

    Checks must pass for the published seed at the published size and at the size for tests. At
    other seeds and sizes, statements of papers are not always true.

    recorded.yaml contains expected values of `data` at the paper's setting.
    """

    checks: Sequence[Check]
    data: Mapping[str, Any]
    panels: Sequence[Panel]
