"""What the runner gives to an experiment, and what it gets back.

The module of an experiment is a page: a docstring that states what the paper shows, `SMALL`, the
sizes of a test, and `experiment(draws, ...)`, whose defaults are the paper's sizes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Lines = Mapping[str, Sequence[float] | Mapping[Any, float]]
"""Values by label, each a list, or a mapping from what they are against."""


class Draws:
    """Random numbers of a seed, float64 unless stated."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Independent standard normal entries."""
        return torch.randn(*shape, generator=self.generator, dtype=dtype)

    def restarted(self, offset: int = 0) -> "Draws":
        """Return the numbers from their beginning, or those of another seed."""
        return Draws(self.seed + offset)


@dataclass(frozen=True)
class Check:
    """A measured number and its expected range.

    `source` says where the range comes from: a paper's statement, theory, or `recorded`, an earlier
    run of the paper's setting with exact decompositions in float64.
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
    """A part of a figure: lines, dashed lines and dots, each in the colors from the first on.

    `log` names the logarithmic axes, `levels` are horizontal lines.
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
    """Checks, which hold for every seed and size; `data`, which recorded.yaml has for the paper's
    setting; and the figure."""

    checks: Sequence[Check]
    data: Mapping[str, Any]
    panels: Sequence[Panel]
