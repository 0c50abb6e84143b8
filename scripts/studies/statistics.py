"""Errors and intervals of means over seeds."""

import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any, Final

LEVEL: Final = 0.95
"""Share of the resamples that an interval holds."""
_DRAWS: Final = 10_000
_EXHAUSTIVE: Final = 20_000

Group = Sequence[Any]


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean of independent values, None of a single one."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) / sqrt(len(values))


def bootstrap(
    groups: Sequence[Group], statistic: Callable[[Sequence[Group]], float | None]
) -> tuple[float, float] | None:
    """The percentile bootstrap interval of `statistic(groups)`, None if it is not always defined
    or every group has one value.

    Every group is resampled by itself, with replacement: all ways if there are few, else 10,000
    that always are the same. Values that belong together, such as pairs of one seed, are one
    element. With n seeds the interval is too narrow by about sqrt((n - 1) / n).
    """
    if all(len(group) < 2 for group in groups):
        return None
    values = [statistic(resampled) for resampled in _resamples(groups)]
    if any(value is None for value in values):
        return None
    ordered = sorted(value for value in values if value is not None)
    tail = (1 - LEVEL) / 2
    return quantile(ordered, tail), quantile(ordered, 1 - tail)


def _resamples(groups: Sequence[Group]) -> Sequence[Sequence[Group]]:
    ways = 1
    for group in groups:
        ways *= len(group) ** len(group)
    if ways <= _EXHAUSTIVE:
        each = [list(itertools.product(group, repeat=len(group))) for group in groups]
        return list(itertools.product(*each))
    generator = random.Random(0)
    return [[generator.choices(group, k=len(group)) for group in groups] for _ in range(_DRAWS)]


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the ascending values lie, linear between two of them."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
