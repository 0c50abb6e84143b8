"""A check: a measured number and its expected range."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import yaml

RECORDED: Final = Path(__file__).with_name("recorded.yaml")


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


def equal(name: str, measured: float, expected: float) -> Check:
    """Check that `measured` is what an SVD gives, up to rounding in float64."""
    return near(name, measured, expected, 1e-9, "theory: SVD", "by SVD")


def recorded(experiment: str, data: Mapping[str, Any]) -> list[Check]:
    """Compare the data of an experiment with its numbers in recorded.yaml."""
    numbers = yaml.load(RECORDED.read_text(encoding="utf-8"), yaml.BaseLoader)
    return list(_compared(numbers.get(experiment, {}), data, ()))


def _compared(expected: Any, measured: Any, path: tuple[str, ...]) -> Iterator[Check]:
    if isinstance(expected, str):
        series = ", ".join(path[:-1])
        yield Check(", ".join(path), float(measured), *bounds(expected), "recorded", series)
        return
    by_name = {str(key): value for key, value in measured.items()} if (
        isinstance(measured, Mapping)
    ) else None  # fmt: skip
    for key, inner in expected.items():
        value = measured[int(key)] if by_name is None else by_name[key]
        yield from _compared(inner, value, (*path, key))


def bounds(text: str) -> tuple[float, float]:
    """Return the range that a text stands for: `LOW to HIGH`, `NUMBER ± PERCENT%`, or a number to
    one unit of its last printed digit."""
    if " to " in text:
        low, high = text.split(" to ")
        return float(low), float(high)
    number, _, percent = text.partition(" ± ")
    if percent:
        slack = abs(float(number)) * float(percent.removesuffix("%")) / 100
    else:
        # Half a unit more than rounding needs, and a little for the binary form of the bounds.
        slack = 1.001 * float(Decimal(10) ** int(Decimal(number).as_tuple().exponent))
    return float(number) - slack, float(number) + slack
