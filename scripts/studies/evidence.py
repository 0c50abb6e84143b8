"""What the committed results of a tuned study say: speed-ups, basins, transfer, stability."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from scripts.studies.comparison import finite, paired
from scripts.studies.records import RECORDS, Record, read_lines
from scripts.studies.schema import Study, read_study
from scripts.studies.statistics import Group, bootstrap

Points = Sequence[tuple[float, float]]
"""(share of the full length, loss), by rising share."""


@dataclass(frozen=True)
class Ratio:
    """A factor over the baseline with its 95% interval; `beyond`: outside of what was measured."""

    value: float
    low: float
    high: float
    beyond: bool


@dataclass(frozen=True)
class Difference:
    """A difference of losses in nats per token, with its 95% interval."""

    value: float
    low: float
    high: float


class Evidence:
    """A study's file with its results.json and runs.jsonl, complete or not."""

    def __init__(self, study: Path, results: Path) -> None:
        """Raises ConfigError or DataError for files that cannot be read."""
        self.study: Study = read_study(study)
        self.name = study.stem
        path, records = results / "results.json", results / RECORDS
        self.results: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        lines = read_lines(records) if records.is_file() else []
        self.records = {line["key"]: Record(**line) for line in lines}

    @property
    def subject(self) -> str:
        """What the study trains: its title after the first comma, the whole one without any."""
        return self.study.title.partition(", ")[2] or self.study.title

    @property
    def complete(self) -> bool:
        """Whether every run has ended."""
        return bool(self.results.get("complete"))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the comparison, none before two seeds of every variant have ended."""
        return list(self.results.get("rows", []))

    @property
    def trials(self) -> list[dict[str, Any]]:
        """What the search has tried."""
        return list(self.results.get("trials", []))

    def row(self, variant: str) -> dict[str, Any] | None:
        """The row of a variant."""
        return next((row for row in self.rows if row["variant"] == variant), None)

    def runs(self, variant: str) -> list[Record]:
        """The records of a variant's seeds at full length, those that have ended."""
        keys = self.results.get("runs", {}).get(variant, [])
        return [self.records[key] for key in keys if key in self.records]

    @property
    def planned(self) -> int:
        """The largest number of runs that the study can have; some are found again."""
        study = self.study
        stages = study.search.stages if study.search is not None else {}
        count = len(study.variants) * len(study.seeds)
        for variant in study.variants.values():
            for name, rungs in stages.items():
                entering = [variant.search[name].count(), *(rung.keep for rung in rungs)]
                count += sum(entering[:-1])
        if study.curve is not None:
            count += len(study.curve.shares) * len(study.curve.seeds)
        return count

    def baseline(self) -> str | None:
        """The variant whose curve says how many tokens a loss costs, if it was measured."""
        measured = self.study.curve is not None and self.results.get("points")
        return self.study.curve.variant if self.study.curve is not None and measured else None


@cache
def token_speedup(evidence: Evidence, variant: str) -> Ratio | None:
    """Tokens that the tuned baseline needs for the variant's loss, over the variant's."""
    name = evidence.baseline()
    mine, base = evidence.row(variant), evidence.row(name) if name is not None else None
    if mine is None or base is None or mine["loss"] is None or base["loss"] is None:
        return None
    by_share = {point["share"]: point["losses"] for point in evidence.results["points"]}
    by_share[1.0] = base["losses"]
    shares = sorted(by_share)
    groups: list[Group] = [mine["losses"], *(by_share[share] for share in shares)]
    if any(loss is None for group in groups for loss in group):
        return None

    def factor(resampled: Sequence[Group]) -> float | None:
        means = [statistics.fmean(group) for group in resampled]
        return share_for(means[0], list(zip(shares, means[1:], strict=True)))

    value, interval = factor(groups), bootstrap(groups, factor)
    if value is None or interval is None:
        return None
    return Ratio(value, *interval, not shares[0] <= value <= shares[-1])


def differences(evidence: Evidence, base: str) -> dict[str, Difference]:
    """Every other variant's loss less that of `base`, seed by seed; failed variants have none."""
    rows = {row["variant"]: row["losses"] for row in evidence.rows}
    others = finite(rows.get(base, [None]))
    found = {}
    for name, losses in rows.items():
        mine = finite(losses)
        if name != base and mine is not None and others is not None:
            pairs = paired(mine, others)
            if pairs.interval is not None:
                found[name] = Difference(pairs.difference, *pairs.interval)
    return found


def share_for(loss: float, points: Points) -> float | None:
    """The share at which a curve reaches `loss`, linear in the share's logarithm.

    Beyond the ends the outermost two points are continued. None where the curve does not fall.
    """
    pairs = [(points[i], points[i + 1]) for i in range(len(points) - 1)]
    inside = [pair for pair in pairs if pair[1][1] <= loss <= pair[0][1]]
    (x0, y0), (x1, y1) = (inside or [pairs[0] if loss > points[0][1] else pairs[-1]])[0]
    if y1 >= y0:
        return None
    return math.exp(math.log(x0) + (loss - y0) / (y1 - y0) * (math.log(x1) - math.log(x0)))


def step_seconds(evidence: Evidence, variant: str) -> float | None:
    """Seconds of a step, the fastest stretch of any seed."""
    found = [record.figures.get("step_seconds") for record in evidence.runs(variant)]
    return min((seconds for seconds in found if seconds), default=None)


@dataclass(frozen=True)
class Basin:
    """The factor between the largest and the smallest rate; `cut`: the grid ends before it does."""

    factor: float
    cut: bool


def basin(trials: Sequence[Mapping[str, Any]], variant: str, within: float) -> Basin | None:
    """The rates with a loss `within` of the best one.

    Of the longest rung of the search's first stage that has at least four rates; between two rates
    the loss is linear in the logarithm.
    """
    points = rate_points(trials, variant)
    if len(points) < 4:
        return None
    best = min(range(len(points)), key=lambda i: points[i][1])
    bound = points[best][1] + within
    ends = edge(points[best::-1], bound), edge(points[best:], bound)
    cut = ends[0] == points[0][0] or ends[1] == points[-1][0]
    return Basin(ends[1] / ends[0], cut)


def rate_points(trials: Sequence[Mapping[str, Any]], variant: str) -> list[tuple[float, float]]:
    """(rate, loss) by rising rate, of the longest rung of the first stage with four or more."""
    mine = [trial for trial in trials if trial["variant"] == variant]
    stage = mine[0]["stage"] if mine else None
    by_share: dict[float, list[tuple[float, float]]] = {}
    for trial in mine:
        if trial["stage"] == stage and trial["loss"] is not None:
            by_share.setdefault(trial["share"], []).append((rate_of(trial), trial["loss"]))
    enough = [share for share, points in by_share.items() if len(points) >= 4]
    return sorted(by_share[max(enough)]) if enough else []


def rate_of(trial: Mapping[str, Any]) -> float:
    """The rate that a trial of the first stage has tried."""
    return float(trial["candidate"][0].partition("=")[2])


def edge(points: Points, bound: float) -> float:
    """Where a curve that begins below `bound` first rises above it, the end if it does not."""
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if y1 > bound:
            share = (bound - y0) / (y1 - y0)
            return math.exp(math.log(x0) + share * (math.log(x1) - math.log(x0)))
    return points[-1][0]


def stability(records: Sequence[Record]) -> dict[str, float | None]:
    """The largest attention logit, the residual's root mean square at the last monitored step,
    spikes and skipped steps: the worst of the seeds."""
    names = ("largest_logit", "residual_rms", "spikes", "skipped_steps")
    return {
        name: max(
            (r.figures[name] for r in records if r.figures.get(name) is not None), default=None
        )
        for name in names
    }


def medians(records: Sequence[Record]) -> tuple[float, float] | None:
    """The median singular value over the largest, at the first and the last monitored step, the
    mean over roles."""
    spectra = [role for record in records for role in record.figures.get("spectra", {}).values()]
    if not spectra:
        return None
    first, last = (statistics.fmean(role[at][5] for role in spectra) for at in ("first", "last"))
    return first, last
