"""The comparison of a study's variants, seed by seed, with errors and intervals."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from scripts.studies.schema import Study
from scripts.studies.statistics import Group, bootstrap, standard_error

ONE_SEED: Final = "One seed: no errors and no intervals. How far seeds differ is not known."


@dataclass(frozen=True)
class Row:
    """What the seeds of one variant say: losses in nats per token, None for a run that failed.

    A variant with a failed run has no mean, and what is compared with it no difference. One seed
    has neither errors nor intervals.

    error       standard error of the mean
    difference  mean over seeds of the loss less that of `against`, with its standard error and its
                95% bootstrap interval
    """

    variant: str
    losses: list[float | None]
    loss: float | None
    error: float | None
    against: str | None = None
    difference: float | None = None
    difference_error: float | None = None
    interval: list[float] | None = None
    chosen: list[str] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """Number of runs that failed."""
        return sum(loss is None for loss in self.losses)


def compare(
    study: Study,
    losses: Mapping[str, Sequence[float | None]],
    chosen: Mapping[str, list[str]] | None = None,
) -> list[Row]:
    """A row per variant; `losses` by variant, in the order of the seeds."""
    rows = []
    for name, variant in study.variants.items():
        mine = finite(losses[name])
        settings = list((chosen or {}).get(name, []))
        loss = statistics.fmean(mine) if mine else None
        error = standard_error(mine) if mine else None
        row = Row(name, list(losses[name]), loss, error, chosen=settings)
        other = finite(losses[variant.against]) if variant.against is not None else None
        if variant.against is not None:
            row = replace(row, against=variant.against)
        if mine and other:
            found = paired(mine, other)
            row = replace(
                row,
                difference=found.difference,
                difference_error=found.error,
                interval=None if found.interval is None else list(found.interval),
            )
        rows.append(row)
    return rows


def finite(losses: Sequence[float | None]) -> list[float] | None:
    """All losses, None if one of the runs failed."""
    found = [loss for loss in losses if loss is not None]
    return found if len(found) == len(losses) else None


@dataclass(frozen=True)
class Paired:
    """The mean difference of two variants over seeds, its standard error and 95% interval."""

    difference: float
    error: float | None
    interval: tuple[float, float] | None


def paired(mine: Sequence[float], other: Sequence[float]) -> Paired:
    """The losses `mine` less `other`, seed by seed."""
    differences = [a - b for a, b in zip(mine, other, strict=True)]

    def mean(groups: Sequence[Group]) -> float:
        return statistics.fmean(groups[0])

    interval = bootstrap([differences], mean)
    return Paired(statistics.fmean(differences), standard_error(differences), interval)


def markdown(rows: Sequence[Row]) -> str:
    """The table of a study; one of a single seed has no intervals, and says so."""
    header, lines = cells(rows)
    text = "".join("| " + " | ".join(each) + " |\n" for each in lines)
    note = f"\n{ONE_SEED}\n" if of_one_seed(rows) else ""
    return f"| {' | '.join(header)} |\n|{'---|' * len(header)}\n{text}{note}"


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The header of a study's table, and the cells of each row."""
    header = ["variant", "validation loss", "difference", "95% interval", "from"]
    lines = [[row.variant, *_figures(row), row.against or ""] for row in rows]
    if of_one_seed(rows):
        for each in (header, *lines):
            del each[3]
    return header, lines


def of_one_seed(rows: Sequence[Row]) -> bool:
    """Whether there are neither errors nor intervals."""
    return all(len(row.losses) == 1 for row in rows)


def _figures(row: Row) -> tuple[str, str, str]:
    """Loss, difference and interval of a row as cells."""
    loss = f"{row.failed} of {len(row.losses)} runs failed"
    if row.loss is not None:
        loss = with_error(f"{row.loss:.4f}", row.error)
    difference = interval = ""
    if row.difference is not None:
        difference = with_error(f"{row.difference:+.4f}", row.difference_error)
    if row.interval is not None:
        interval = f"{row.interval[0]:+.4f} to {row.interval[1]:+.4f}"
    return loss, difference, interval


def with_error(figure: str, error: float | None) -> str:
    """A figure with its standard error if there is one."""
    return figure if error is None else f"{figure} ± {error:.4f}"
