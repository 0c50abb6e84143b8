"""Interface between the runner and an experiment.

An experiment is a function of `draws` and of sizes. The default sizes are the same as in the paper.
The first paragraph of the function's docstring states the paper's claim.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Lines = Mapping[str, Sequence[float] | Mapping[Any, float]]
"""Lines by label. A line is a list of values or a mapping from x to y."""


class Draws:
    """A seeded random number generator."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return independent standard normal samples."""
        return torch.randn(*shape, generator=self.generator, dtype=dtype)

    def restarted(self, offset: int = 0) -> "Draws":
        """Return a new generator with this seed plus `offset`."""
        return Draws(self.seed + offset)


@dataclass(frozen=True)
class Check:
    """A measured number and its expected range.

    `source` states the origin of the range: a statement in a paper, theory, or `recorded`. Recorded
    ranges come from an earlier run at the paper's setting with exact float64 decompositions.
    """

    name: str
    measured: float
    low: float
    high: float
    source: str
    series: str = ""
    """Passing checks in the same series share a row in the printed table."""

    @property
    def passed(self) -> bool:
        """Whether the number is within its range (False for NaN)."""
        return self.low <= self.measured <= self.high


def near(
    name: str, measured: float, expected: float, relative: float, source: str, series: str = ""
) -> Check:
    """Return a check that `measured` equals `expected` to within a relative tolerance."""
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
    """A figure panel. Lines, dashed lines and dots use the same sequence of colors.

    `log` names the logarithmic axes: "x", "y" or "xy". `levels` maps labels to the y values of
    horizontal lines.
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
    """The outcome of an experiment: checks, data and figure panels.

    Checks must pass with the published seed, both at the published size and at the test size. With
    other seeds and sizes, the papers' statements do not always hold.

    recorded.yaml holds expected values of `data` at the paper's setting.
    """

    checks: Sequence[Check]
    data: Mapping[str, Any]
    panels: Sequence[Panel]
