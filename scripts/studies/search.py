"""Tune a study's variants by successive halving, or take settings from another study."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.studies.description import Rung, Study
from scripts.studies.records import Record
from scripts.studies.tables import grid_ends, read_results
from scripts.studies.trainer import Run
from training.errors import DataError, InputError

Candidate = list[str]
Results = list[Record]
Train = Callable[[Iterable[Run]], Results]
"""Function that trains runs, possibly several at a time, and returns their records in order."""


@dataclass(frozen=True)
class Trial:
    """A candidate trained in a rung of a stage.

    `loss` is the mean over the rung's seeds, or None if a run failed.
    """

    variant: str
    stage: str
    share: float
    candidate: Candidate
    loss: float | None
    seeds: list[int]


@dataclass(frozen=True)
class Outcome:
    """The result of a search: the overrides chosen for each variant, and all trials."""

    chosen: dict[str, list[str]]
    trials: list[Trial]


def search(
    study: Study,
    start: dict[str, list[str]],
    extra: Sequence[str],
    train: Train,
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Tune every variant, starting from its overrides in `start`. `extra` applies to all runs.

    `report` is called after every rung with the results so far.
    """
    chosen = {name: list(start.get(name, [])) for name in study.variants}
    trials: list[Trial] = []
    stages = study.search.stages if study.search is not None else {}
    for stage, rungs in stages.items():
        left = {
            name: variant.search[stage].candidates(chosen[name])
            for name, variant in study.variants.items()
        }
        for rung in rungs:
            tried = try_all(study, stage, rung, chosen, left, extra, train)
            trials += tried
            for name in left:
                mine = [trial for trial in tried if trial.variant == name]
                # Failed candidates come last.
                mine.sort(key=lambda trial: math.inf if trial.loss is None else trial.loss)
                left[name] = [trial.candidate for trial in mine[: rung.keep]]
            report(Outcome(chosen, trials))
        for name, (winner,) in left.items():
            chosen[name] += winner
    return Outcome(chosen, trials)


def try_all(
    study: Study,
    stage: str,
    rung: Rung,
    chosen: dict[str, list[str]],
    left: dict[str, list[Candidate]],
    extra: Sequence[str],
    train: Train,
) -> list[Trial]:
    """Train all remaining candidates for the rung's share of the full length."""
    assert study.search is not None
    seeds = rung.seeds or [study.search.seed]
    entries = [(name, candidate) for name, candidates in left.items() for candidate in candidates]
    runs = [
        run_of(
            study,
            name,
            [*chosen[name], *candidate],
            seed,
            share=rung.share,
            extra=extra,
            label=f"{name} {stage} {rung.share:g} {' '.join(candidate)}"
            + (f" seed {seed}" if rung.seeds else ""),
        )
        for name, candidate in entries
        for seed in seeds
    ]
    candidate_of: dict[tuple[str, str], Candidate] = {}
    for (name, candidate), run in zip(entries, runs[:: len(seeds)], strict=True):
        other = candidate_of.setdefault((name, run.key), candidate)
        if other is not candidate:
            raise InputError(
                f"{name}: the candidates {' '.join(other)} and {' '.join(candidate)} are the same "
                "run, because later overrides replace all values in which the candidates differ; "
                "remove one of the candidates"
            )
    trained = iter(train(runs))
    trials = []
    for name, candidate in entries:
        records = itertools.islice(trained, len(seeds))
        losses = [record.loss for record in records if record.loss is not None]
        loss = statistics.fmean(losses) if len(losses) == len(seeds) else None
        trials.append(Trial(name, stage, rung.share, candidate, loss, seeds))
    return trials


def run_of(
    study: Study,
    name: str,
    tuned: Sequence[str],
    seed: int,
    *,
    share: float = 1.0,
    extra: Sequence[str] = (),
    label: str | None = None,
) -> Run:
    """Return a variant's run at `share` of the full length.

    `extra` takes precedence over `tuned`, and `tuned` over the variant's own overrides.
    """
    variant = study.variants[name]
    overrides = (
        *study.overrides,
        *study.length(share),
        *variant.overrides,
        *tuned,
        *extra,
        f"seed={seed}",
    )
    return Run(label or f"{name}-{seed}", variant.config, overrides)


def tuned_settings(study: Study, root: Path) -> dict[str, list[str]]:
    """Return the overrides that another study chose for each variant, or {} if `tuned_in` is None.

    `tuned_in.results` is relative to `root`. Raises DataError if the other study is incomplete,
    lacks a variant, or chose a setting at an end of its grid.
    """
    if study.tuned_in is None:
        return {}
    content = read_results(root / study.tuned_in.results / "results.json")
    if not content["complete"]:
        raise DataError(f"tuned_in.results: the study {study.tuned_in.results} must be complete")
    sources = {name: variant.tuned_as or name for name, variant in study.variants.items()}
    missing = sorted({*sources.values()} - content["chosen"].keys())
    if missing:
        raise DataError(f"{study.tuned_in.results} is missing the variants {', '.join(missing)}")
    ended = grid_ends(content)
    if ends := [end for source in sources.values() for end in ended.get(source, [])]:
        raise DataError(f"tuned_in.results: {'; '.join(ends)}; extend the grid first")
    return {name: content["chosen"][source] for name, source in sources.items()}
