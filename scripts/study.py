"""Tune the variants of a study at equal cost, run them with several seeds and compare them.

    python scripts/study.py studies/sso/radius.yaml runs/studies/radius
    python scripts/study.py studies/sso/radius.yaml runs/studies/radius --jobs 2 train.steps=50

A study is a YAML file: `title`, `seeds`, `overrides` for every run, and `variants` by name, each
with a `config`, its own `overrides` and the variant it is compared `against`. Each run is a process
of `pretrain.py` with one thread and the `environment` of the study, and with the ranks of `--nproc`
or `--gpus-per-run`. A finished run is not repeated, even without its folder: runs.jsonl stores its
figures by its settings, and refuses a study whose data or environment has changed. So the same
command continues an interrupted study, and several processes of it, by hand or as a SLURM array
(scripts/slurm/study.sbatch), share the runs. results.json and table.md appear next to runs.jsonl at
the end, results.json with `complete: false` after each part.

The figure of a run is its last validation loss (nats per token), the mean over its validation sets.
A seed sets both the initial weights and the order of the data. Variants are compared seed by seed,
with Student's 95% interval over the seeds: `level` if the whole interval is within `level_within`
(0.02 nats) of 0, `cannot tell` if a wider interval contains 0. A run with a nonfinite loss counts
as failed, and so does its variant. A variant whose chosen setting is at an end of its grid is
`refused`. Further keys in which a variant differs from the one it is compared with (not tuned, in
`overrides` or in `differs`) are listed at the start and in table.md.

With `search`, every variant is tuned first, by successive halving with the seed of the search: the
candidates of a stage are trained for a `share` of the length `full`, the best `keep` for the next
share, and the choice is kept for the next stage. A study that tunes variants at different cost is
refused. With `tuned_in`, variants start from the choices of another study. A width sweep is a study
with widths as variants and a grid of rates as its stage.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.command import command, write_whole
from scripts.studies.description import Study, read_study
from scripts.studies.differences import differences, sentences
from scripts.studies.records import Record, RecordBook
from scripts.studies.search import Outcome, Train, begin, run_of, search
from scripts.studies.tables import markdown
from scripts.studies.trainer import UNKNOWN, Run, Trainer, add_places, places
from training.config import Config, load_config
from training.errors import InputError

RESULTS = "results.json"


def run_study(
    study: Study,
    results: Path,
    train: Train,
    extra: Sequence[str],
    begin_runs: Callable[[Iterable[Run]], None] = lambda runs: None,
) -> dict[str, Any]:
    """Tune, train all seeds, then the curve; results.json is updated after each part.

    `begin_runs` receives all coming runs, so that no place is idle while a part ends. Returns
    the content of results.json.
    """
    study, start = begin(study, ROOT)
    given = list(extra)
    study, extra = shortened(study, extra)
    check_tokenizers(study, extra)
    differ = differences(study, start, check_candidates(study, start, extra))
    for line in sentences(study, differ):
        print(line, file=sys.stderr)
    content: dict[str, Any] = {
        **asdict(study),
        "complete": False,
        "command_overrides": given,
        "budget": {name: study.budget(name) for name in study.variants},
        "differ": differ,
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
    """Return the study at the full length in `extra`, and the rest of `extra`.

    Each run trains for its share of that length. Raises InputError unless it is a number.
    """
    rest, full = [], dict(study.full)
    for text in extra:
        key, _, value = text.partition("=")
        if key not in full:
            rest.append(text)
        elif value.isdecimal():
            full[key] = int(value)
        else:
            raise InputError(f"{key} must be a whole number, got {value}")
    return replace(study, full=full), rest


def check_tokenizers(study: Study, extra: Sequence[str]) -> None:
    """Raise InputError if compared variants have losses per token of different tokenizers."""
    data = {name: run_of(study, name, [], 0, extra=extra).data for name in study.variants}
    made = {name: {sums[0] for sums in sets.values()} - {UNKNOWN} for name, sets in data.items()}
    for name, variant in study.variants.items():
        if variant.against is not None and made[name] != made[variant.against]:
            raise InputError(
                f"{name} is against {variant.against}, whose data has another tokenizer: losses "
                "per token are not comparable"
            )


def check_candidates(
    study: Study, start: dict[str, list[str]], extra: Sequence[str]
) -> dict[str, Config]:
    """Return the config of each variant with the first candidate of each stage in place of its
    choice.

    Raises InputError for a candidate of any stage whose config cannot be read, before the first
    run.
    """
    stages = study.search.stages if study.search is not None else {}
    configs = {}
    for name, variant in study.variants.items():
        chosen = list(start.get(name, []))
        for stage in stages:
            candidates = variant.search[stage].candidates(chosen)
            for candidate in candidates:
                config_of(study, name, [*chosen, *candidate], extra, stage)
            chosen += candidates[0]
        configs[name] = config_of(study, name, chosen, extra)
    return configs


def config_of(
    study: Study, name: str, tuned: list[str], extra: Sequence[str], stage: str = ""
) -> Config:
    """Return the config of a variant; raises InputError naming the variant if it cannot be read."""
    run = run_of(study, name, tuned, 0, extra=extra)
    try:
        return load_config(ROOT / run.config, run.overrides)
    except InputError as error:
        raise InputError(f"{' '.join(filter(None, (name, stage, *tuned)))}: {error}") from None


def row(name: str, records: Sequence[Record]) -> dict[str, Any]:
    """Return the losses of a variant's seeds."""
    losses = [record.loss for record in records]
    return {"variant": name, "runs": [record.key for record in records], "losses": losses}


def curve_runs(study: Study, outcome: Outcome, extra: Sequence[str]) -> dict[float, list[Run]]:
    """Return the runs of the curve's variant by share of the full length, one per seed."""
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
    """Write results.json and its tables."""
    write_whole(folder / RESULTS, json.dumps(content, indent=1) + "\n")
    write_whole(folder / "table.md", markdown(content))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path, help="YAML file of the study")
    parser.add_argument("output", type=Path, help="output folder of the runs")
    parser.add_argument(
        "--results", type=Path, help="folder of runs.jsonl and results.json (default: output)"
    )
    add_places(parser)
    parser.add_argument("override", nargs="*", help="override of every run's config")
    return parser.parse_intermixed_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study and return the exit code."""
    options = parse(arguments)
    output = options.output.absolute()
    results = (options.results or output).absolute()
    study = read_study(options.study)
    book = RecordBook(results)
    trainer = Trainer(output, book, places(options), study.environment)
    with closing(trainer):
        content = run_study(study, results, trainer.records, options.override, trainer.begin)
    print(markdown(content), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
