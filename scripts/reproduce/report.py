"""Tables of checks: a line each, or one for the worst of a series."""

import math
from collections.abc import Sequence

from scripts.reproduce.frame import Check, Result

HEADINGS = ("experiment", "figure", "measured", "expected", "from", "")


def expectation(check: Check) -> str:
    """The range of a check in words."""
    if math.isinf(check.high):
        return f">= {check.low:.4g}"
    if math.isinf(check.low):
        return f"<= {check.high:.4g}"
    low, high = f"{check.low:.4g}", f"{check.high:.4g}"
    return low if low == high else f"{low} to {high}"


def placement(check: Check) -> float:
    """How far a figure lies from the middle of its range; 1 at a bound.

    Figures with one bound are ordered by how close to it they are.
    """
    if math.isinf(check.high):
        return check.low - check.measured
    if math.isinf(check.low):
        return check.measured - check.high
    half = (check.high - check.low) / 2
    distance = abs(check.measured - (check.high + check.low) / 2)
    return distance / half if half else float(distance > 0)


def rows(result: Result) -> list[tuple[str, ...]]:
    """The lines of one experiment, under `HEADINGS`. A series that passes has one, its worst."""
    series: dict[str, list[Check]] = {}
    for check in result.checks:
        series.setdefault(check.series or check.name, []).append(check)
    found = []
    for members in series.values():
        failed = [check for check in members if not check.passed]
        if len(members) == 1 or failed:
            found += [row(result, check, check.name) for check in failed or members]
        else:
            worst = max(members, key=placement)
            found.append(row(result, worst, f"{len(members)} numbers; worst: {worst.name}"))
    return found


def row(result: Result, check: Check, name: str) -> tuple[str, ...]:
    """One line."""
    verdict = "pass" if check.passed else "FAIL"
    return (
        result.name, name, f"{check.measured:.4g}", expectation(check), check.source, verdict
    )  # fmt: skip


def markdown(results: Sequence[Result]) -> str:
    """The table of all results."""
    lines = [HEADINGS, ("---",) * len(HEADINGS)]
    for result in results:
        lines += rows(result)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def text(results: Sequence[Result]) -> str:
    """The same for a terminal: columns aligned at the left."""
    lines = [HEADINGS, *(line for result in results for line in rows(result))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
