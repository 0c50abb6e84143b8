"""The experiments by name, and tables of their checks.

A table has a line per check, or one for the worst of a series.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.experiments.check import Check
from scripts.experiments.experiment import Experiment, Result, result_of, write_json
from spectral.batching import grouped
from training.report.table import markdown_table, table

NAMES = (
    "pi_bound", "relu_features", "gated_features", "rank_growth", "sparse_regression",
    "gated_batches", "gated_regression", "deep_linear", "over_flattening", "muon_gap",
    "correlated_weights", "solver_curve",
)  # fmt: skip
EXPERIMENTS: dict[str, Experiment[Any]] = {
    name: import_module(f"scripts.experiments.{name}").EXPERIMENT for name in NAMES
}


HEADINGS = ("experiment", "figure", "measured", "expected", "from", "")


def expectation(check: Check) -> str:
    """The range of a check as text."""
    if math.isinf(check.high):
        return f">= {check.low:.4g}"
    if math.isinf(check.low):
        return f"<= {check.high:.4g}"
    low, high = f"{check.low:.4g}", f"{check.high:.4g}"
    return low if low == high else f"{low} to {high}"


def closeness(check: Check) -> float:
    """How close a number is to failing: the more, the larger, and 1 at the end of a range.

    Numbers with one bound are ordered by their distance to it.
    """
    if math.isinf(check.high) or math.isinf(check.low):
        return max(check.low - check.measured, check.measured - check.high)
    half = (check.high - check.low) / 2
    distance = abs(check.measured - (check.high + check.low) / 2)
    return distance / half if half else float(distance > 0)


def rows(result: Result) -> Iterator[tuple[str, ...]]:
    """The lines of one experiment, under `HEADINGS`; a series that passes has one, its worst."""
    series = grouped(result.checks, lambda check: check.series or check.name)
    for members in series.values():
        shown = [check for check in members if not check.passed]
        about = ""
        if not shown:
            shown = [max(members, key=closeness)]
            about = f"{len(members)} numbers; worst: " if len(members) > 1 else ""
        for check in shown:
            verdict = "pass" if check.passed else "FAIL"
            measured = f"{check.measured:.4g}"
            yield (result.name, about + check.name, measured, expectation(check), check.source,
                   verdict)  # fmt: skip


def markdown(results: Sequence[Result]) -> str:
    """The table of all results in Markdown."""
    return markdown_table(HEADINGS, (line for result in results for line in rows(result)))


def text(results: Sequence[Result]) -> str:
    """The table of all results for a terminal."""
    return table(HEADINGS, (line for result in results for line in rows(result)))


def write_summary(output: Path, names: Iterable[str]) -> None:
    """Write results.json and table.md of the named experiments whose results are in the folder."""
    paths = [output / f"{name}.json" for name in names]
    results = [
        result_of(json.loads(path.read_text(encoding="utf-8"))) for path in paths if path.exists()
    ]
    write_json(output / "results.json", [result.content() for result in results])
    (output / "table.md").write_text(markdown(results), encoding="utf-8")
