"""The comparison of a study's variants, seed by seed, with errors and intervals."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from scripts.studies.schema import Study
from scripts.studies.statistics import Group, bootstrap, standard_error


@dataclass(frozen=True)
class Row:
    """What the seeds of one variant say: losses in nats per token, None for a run that failed.

    A variant with a failed run has no mean, and what is compared with it no difference.

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
        loss = statistics.mean(mine) if mine else None
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
    error: float
    interval: tuple[float, float] | None


def paired(mine: Sequence[float], other: Sequence[float]) -> Paired:
    """The losses `mine` less `other`, seed by seed."""
    differences = [a - b for a, b in zip(mine, other, strict=True)]

    def mean(groups: Sequence[Group]) -> float:
        return statistics.mean(groups[0])

    interval = bootstrap([differences], mean)
    return Paired(statistics.mean(differences), standard_error(differences), interval)


def markdown(rows: Sequence[Row]) -> str:
    """The table of a study."""
    lines = [
        "| variant | validation loss | difference | 95% interval | from |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        loss = f"{row.failed} of {len(row.losses)} runs failed"
        if row.loss is not None:
            loss = f"{row.loss:.4f} ± {row.error:.4f}"
        difference = interval = ""
        if row.difference is not None:
            difference = f"{row.difference:+.4f} ± {row.difference_error:.4f}"
        if row.interval is not None:
            interval = f"{row.interval[0]:+.4f} to {row.interval[1]:+.4f}"
        lines.append(
            f"| {row.variant} | {loss} | {difference} | {interval} | {row.against or ''} |"
        )
    return "\n".join(lines) + "\n"
