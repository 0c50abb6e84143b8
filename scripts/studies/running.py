"""Run a study: check it, tune the variants, train all seeds and write the results."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scripts.command import counted, warn, write_whole
from scripts.studies.description import Study, first_key
from scripts.studies.differences import differences, measured_differently, sentences
from scripts.studies.records import Record
from scripts.studies.search import Outcome, Train, run_of, search, tuned_settings
from scripts.studies.tables import markdown
from scripts.studies.trainer import ROOT, UNKNOWN, Run
from training.config import Config, load_config
from training.errors import InputError
from training.report.text import progress

RESULTS = "results.json"


def run_study(
    study: Study,
    results: Path,
    train: Train,
    extra: Sequence[str],
    begin_runs: Callable[[Iterable[Run]], None] = lambda runs: None,
) -> dict[str, Any]:
    """Tune the variants, train all seeds, and train the runs of the study's curve. Return the
    contents of results.json.

    results.json is updated after each part. After tuning, `begin_runs` is called with all remaining
    runs, so that CPUs and GPUs do not sit idle between parts.
    """
    start = tuned_settings(study, ROOT)
    given = list(extra)
    study, extra = shortened(study, extra)
    check_tokenizers(study, extra)
    configs = check_candidates(study, start, extra)
    differ, unlike = differences(study, start, configs), measured_differently(configs, study)
    for line in (*sentences(study, differ), *hopeless_grids(study)):
        print(line, file=sys.stderr)
    for name, reasons in unlike.items():
        text = f"losses of {name} and its reference are not comparable, because the runs differ in"
        warn(f"the validation {text} {', '.join(reasons)}")
    content: dict[str, Any] = {
        **asdict(study),
        "complete": False,
        "command_overrides": given,
        "budget": {name: study.budget(name) for name in study.variants},
        "differ": differ,
        "not_comparable": unlike,
    }

    def report(outcome: Outcome) -> None:
        trials = [asdict(trial) for trial in outcome.trials]
        content.update(chosen=outcome.chosen, trials=trials)
        write(results, content)

    outcome = search(study, start, extra, train, report)
    report(outcome)
    by_seed = [
        [run_of(study, n, outcome.chosen[n], seed, extra=extra) for n in study.variants]
        for seed in study.seeds
    ]
    by_share = curve_runs(study, outcome, extra)
    begin_runs(run for runs in (*by_seed, *by_share.values()) for run in runs)
    seeds: dict[str, list[Record]] = {name: [] for name in study.variants}
    for runs in by_seed:
        for name, record in zip(study.variants, train(runs), strict=True):
            seeds[name].append(record)
        content["rows"] = [row(name, mine) for name, mine in seeds.items()]
        write(results, content)
    content["points"] = [
        {"share": share, "losses": [record.loss for record in train(runs)]}
        for share, runs in by_share.items()
    ]
    content["complete"] = True
    write(results, content)
    return content


def shortened(study: Study, extra: Sequence[str]) -> tuple[Study, list[str]]:
    """Apply the overrides in `extra` whose keys are in the study's `full`.

    Return the study with the new values in `full`, and the remaining overrides. Raises InputError
    if a new value is not a non-negative integer.
    """
    rest, full = [], dict(study.full)
    for text in extra:
        key, _, value = text.partition("=")
        if key not in full:
            rest.append(text)
        elif re.fullmatch("[0-9]{1,18}", value):
            full[key] = int(value)
        else:
            raise InputError(f"{key} must be a non-negative integer, got {value:.40}")
    return replace(study, full=full), rest


def check_tokenizers(study: Study, extra: Sequence[str]) -> None:
    """Raise InputError if a variant and its reference use data with different tokenizers."""
    data = {name: run_of(study, name, [], 0, extra=extra).data for name in study.variants}
    made = {name: {sums[0] for sums in sets.values()} - {UNKNOWN} for name, sets in data.items()}
    for name, variant in study.variants.items():
        if variant.against is not None and made[name] != made[variant.against]:
            raise InputError(
                f"{name} and {variant.against} must have the same tokenizer, because losses per "
                "token are not comparable across tokenizers"
            )


def check_candidates(
    study: Study, start: dict[str, list[str]], extra: Sequence[str]
) -> dict[str, Config]:
    """Load the configs of all candidates. For each variant, return the config that uses the first
    candidate of every stage.

    Raises InputError if a config is invalid.
    """
    stages = study.search.stages if study.search is not None else {}
    total = sum(v.search[stage].count() for v in study.variants.values() for stage in stages)
    read, configs = 0, {}
    with progress(lambda: f"checked the configs of {read} of {total} candidates"):
        for name, variant in study.variants.items():
            chosen = list(start.get(name, []))
            for stage in stages:
                candidates = variant.search[stage].candidates(chosen)
                for candidate in candidates:
                    config_of(study, name, [*chosen, *candidate], extra, stage)
                    read += 1
                chosen += candidates[0]
            configs[name] = config_of(study, name, chosen, extra)
    return configs


def hopeless_grids(study: Study) -> list[str]:
    """Return a warning for each grid in which every value is at an end (see `grid_ends`)."""
    lines = []
    for name, variant in study.variants.items():
        grids: dict[str, set[float]] = {}
        for stage in variant.search.values():
            for keys, values in (stage.grid or stage.factors).items():
                grids.setdefault(first_key(keys), set()).update(values)
        lines += [
            f"warning: the grid of {name} for {key} has only {counted(len(values), 'value')}, so "
            "the best value is at an end and the verdict will be `refused`"
            for key, values in grids.items()
            if values == {max(values)} | {min(values)} - {0}
        ]
    return lines


def config_of(
    study: Study, name: str, tuned: list[str], extra: Sequence[str], stage: str = ""
) -> Config:
    """Return a variant's config. Raises an InputError that names the variant if the config is
    invalid."""
    run = run_of(study, name, tuned, 0, extra=extra)
    try:
        return load_config(ROOT / run.config, run.overrides)
    except InputError as error:
        raise InputError(f"{' '.join(filter(None, (name, stage, *tuned)))}: {error}") from None


def row(name: str, records: Sequence[Record]) -> dict[str, Any]:
    """Return a variant's losses and record keys, with one entry per seed.

    If all records contain the losses of several datasets, the losses by dataset are included.
    """
    line: dict[str, Any] = {
        "variant": name,
        "runs": [record.key for record in records],
        "losses": [record.loss for record in records],
    }
    by_dataset = [{} if r.failed else r.figures.get("datasets", {}) for r in records]
    names = dict.fromkeys(each for losses in by_dataset for each in losses)
    complete = all(r.failed or losses for r, losses in zip(records, by_dataset, strict=True))
    if complete and len(names) > 1:
        line["datasets"] = {each: [losses.get(each) for losses in by_dataset] for each in names}
    return line


def curve_runs(study: Study, outcome: Outcome, extra: Sequence[str]) -> dict[float, list[Run]]:
    """Return the runs for the study's curve: for each share of the full length, one run per
    seed."""
    if study.curve is None:
        return {}
    name = study.curve.variant
    return {
        share: [
            run_of(
                study,
                name,
                outcome.chosen[name],
                seed,
                share=share,
                extra=extra,
                label=f"{name} {share:g}-{seed}",
            )
            for seed in study.curve.seeds
        ]
        for share in study.curve.shares
    }


def write(folder: Path, content: dict[str, Any]) -> None:
    """Write results.json and table.md."""
    write_whole(folder / RESULTS, json.dumps(content, indent=1) + "\n")
    write_whole(folder / "table.md", markdown(content))
