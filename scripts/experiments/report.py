"""Tables of checks, with a line per check or one for the worst of a series."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from scripts.experiments.check import Check
from scripts.experiments.experiment import Result, described, plain, read_result
from training.report.table import markdown_table, table

HEADINGS = ("experiment", "figure", "measured", "expected", "from", "")


def expectation(check: Check) -> str:
    """The range of a check as text."""
    if math.isinf(check.high):
        return f">= {check.low:.4g}"
    if math.isinf(check.low):
        return f"<= {check.high:.4g}"
    low, high = f"{check.low:.4g}", f"{check.high:.4g}"
    return low if low == high else f"{low} to {high}"


def placement(check: Check) -> float:
    """The distance of a number from the middle of its range; 1 at a bound.

    Numbers with one bound are ordered by their distance to it.
    """
    if math.isinf(check.high):
        return check.low - check.measured
    if math.isinf(check.low):
        return check.measured - check.high
    half = (check.high - check.low) / 2
    distance = abs(check.measured - (check.high + check.low) / 2)
    return distance / half if half else float(distance > 0)


def rows(result: Result) -> list[tuple[str, ...]]:
    """The lines of one experiment, under `HEADINGS`; a series that passes has one, its worst."""
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
    """One line of the table."""
    verdict = "pass" if check.passed else "FAIL"
    return (
        result.name, name, f"{check.measured:.4g}", expectation(check), check.source, verdict
    )  # fmt: skip


def markdown(results: Sequence[Result]) -> str:
    """The table of all results in Markdown."""
    return markdown_table(HEADINGS, _lines(results))


def text(results: Sequence[Result]) -> str:
    """The table of all results for a terminal."""
    return table(HEADINGS, _lines(results))


def _lines(results: Sequence[Result]) -> list[tuple[str, ...]]:
    return [line for result in results for line in rows(result)]


def write_summary(output: Path, names: Iterable[str]) -> None:
    """Write results.json and table.md of the named experiments whose results are in the folder."""
    paths = [output / f"{name}.json" for name in names]
    results = [read_result(path) for path in paths if path.exists()]
    content = [
        {"name": result.name, "source": result.source, "seconds": round(result.seconds, 1)}
        | {"passed": not result.failed, "checks": [described(check) for check in result.checks]}
        for result in results
    ]
    summary = json.dumps(plain(content), indent=1, allow_nan=False) + "\n"
    (output / "results.json").write_text(summary, encoding="utf-8")
    (output / "table.md").write_text(markdown(results), encoding="utf-8")
