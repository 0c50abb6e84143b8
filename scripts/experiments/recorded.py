"""Numbers of an earlier run of each experiment, from recorded.yaml."""

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import yaml

from scripts.experiments.experiment import Check

FILE: Final = Path(__file__).with_name("recorded.yaml")


def recorded(name: str, data: Any) -> list[Check]:
    """Compare the data of an experiment, read from JSON, with its numbers in recorded.yaml."""
    numbers = yaml.load(FILE.read_text(encoding="utf-8"), yaml.BaseLoader)
    return list(compared(numbers.get(name, {}), data, ()))


def compared(expected: Any, measured: Any, path: tuple[str, ...]) -> Iterator[Check]:
    """Yield a check of each number of `expected` with the one in the same place of `measured`."""
    if isinstance(expected, str):
        low, high = bounds(expected)
        yield Check(", ".join(path), measured, low, high, "recorded", ", ".join(path[:-1]))
        return
    for key, inner in expected.items():
        value = measured[int(key) if isinstance(measured, list) else key]
        yield from compared(inner, value, (*path, key))


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
