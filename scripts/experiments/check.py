"""A check: a measured number and its expected range."""

import math
from dataclasses import dataclass
from decimal import Decimal


@dataclass(frozen=True)
class Check:
    """A measured number and its expected range.

    `source` says where the range comes from: a paper's statement, theory, or `recorded`, an earlier
    run of ours of the paper's setting with exact decompositions in float64.
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


def at_least(name: str, measured: float, low: float, source: str, series: str = "") -> Check:
    """Check that `measured` is `low` or more."""
    return Check(name, measured, low, math.inf, source, series)


def at_most(name: str, measured: float, high: float, source: str, series: str = "") -> Check:
    """Check that `measured` is `high` or less."""
    return Check(name, measured, -math.inf, high, source, series)


def equal(name: str, measured: float, expected: float, source: str, series: str = "") -> Check:
    """Check that `measured` is `expected` up to rounding in float64."""
    return near(name, measured, expected, 1e-9, source, series)


def printed(name: str, measured: float, text: str, source: str, series: str = "") -> Check:
    """Check that `measured` is the number `text`, to one unit of its last printed digit."""
    expected = Decimal(text)
    unit = float(Decimal(10) ** int(expected.as_tuple().exponent))
    # Half a unit more than rounding needs, and a little for the binary form of the bounds.
    return Check(
        name,
        measured,
        float(expected) - 1.001 * unit,
        float(expected) + 1.001 * unit,
        source,
        series,
    )
