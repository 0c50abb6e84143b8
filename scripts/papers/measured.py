"""Measured results behind the rows of docs/papers.md, committed as JSON.

For runs, the JSON contains each run's command, config hash, versions and metric series over the
monitored steps. For a study, the JSON contains the losses of each variant.
"""

import hashlib
import json
import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import pandas as pd

from scripts.plots.run_data import Line, RunData, read_run
from scripts.studies.description import Study, read_study
from scripts.studies.records import Record, RecordBook
from scripts.studies.tables import comparison
from scripts.studies.trainer import Run
from training.config import Config, load_config, load_saved_config
from training.config.binding import bind
from training.errors import InputError
from training.json_file import read_json

ROOT: Final = Path(__file__).resolve().parents[2]
DIGITS: Final = 5
"""Number of significant digits to store. A single seed of a tiny model is less accurate."""

OVER: Final[dict[str, Callable[[list[float]], float]]] = {
    "least": min,
    "median": statistics.median,
    "mean": statistics.fmean,
    "largest": max,
}
"""Reductions over matrices or blocks."""

Series = dict[int, float]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Metrics to read from finished runs or from a finished study.

    runs    run folders, or names of study variants, by short name
    series  metrics by name, read at every step at which they were logged: `metric NAME` from
            metrics.jsonl; `OVER NAME ROLE` or `OVER NAME ROLE LAYER` over matrices; `OVER NAME
            blocks` over blocks. OVER is least, median, mean or largest. NAME after OVER is a
            metric in docs/monitors.md, or `quantile_P`: the singular value at P percent divided
            by the largest singular value (of PC(W) in PC layers)
    study   folder with a study's results; series are read from the runs of all seeds
    seeds   seeds of each run, with results in the subfolders seed_1, seed_2, ...; empty: a single
            run with the recipe's seed
    """

    runs: dict[str, str] = field(default_factory=dict)
    series: dict[str, str] = field(default_factory=dict)
    study: str | None = None
    seeds: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.study is not None and self.seeds:
            raise ValueError(f"`seeds` must be empty for a measure with `study`, got {self.seeds}")
        for name, text in self.series.items():
            words = text.split()
            if (words[0] == "metric") != (len(words) == 2) or words[0] not in ("metric", *OVER):
                raise ValueError(f"{name} must be `metric NAME` or `OVER NAME ROLE`, got {text}")


def measure(what: Measure, commands: Sequence[str]) -> dict[str, Any]:
    """Return the contents of a result file. `commands` are the row's tiny commands.

    Raises InputError if a run is missing or unfinished, used a different config, or lacks a metric.
    """
    if what.study is not None:
        return measure_study(what, commands)
    made_by = {load_config(*arguments(each)).run.dir: each for each in commands if trains(each)}
    content = {}
    for name, folder in what.runs.items():
        command = made_by[folder]
        if what.seeds:
            content[name] = {
                "command": command,
                "seeds": {
                    str(seed): measure_run(each, what.series)
                    for seed, each in zip(what.seeds, seeded(command, what.seeds), strict=True)
                },
            }
        else:
            content[name] = {"command": command} | measure_run(command, what.series)
    return content


def measure_run(command: str, series: Mapping[str, str]) -> dict[str, Any]:
    """Return the provenance and metric series of a command's finished run."""
    folder = ROOT / load_config(*arguments(command)).run.dir
    made = provenance(folder, command)
    run = read_run(folder)
    return made | {"series": {key: series_of(run, text) for key, text in series.items()}}


def seeded(command: str, seeds: Sequence[int]) -> list[str]:
    """Return one training command per seed, or `[command]` if there are no seeds."""
    if not seeds:
        return [command]
    folder = load_config(*arguments(command)).run.dir
    return [f"{command} run.dir={folder}/seed_{seed} seed={seed}" for seed in seeds]


def measure_study(what: Measure, commands: Sequence[str]) -> dict[str, Any]:
    """Return the contents of a result file for a study, which is run by one of `commands`.

    Raises InputError if the study is unfinished or does not match its YAML file.
    """
    command = next(each for each in commands if shlex.split(each)[-1] == what.study)
    words = shlex.split(command)  # python, script, the study's YAML file, output folder, ...
    described, output = ROOT / words[2], ROOT / words[3]
    file = ROOT / str(what.study) / "results.json"
    results: dict[str, Any] = read_json(file) if file.is_file() else {"complete": False}
    keys = results.keys() & Study.__dataclass_fields__.keys()
    recorded = {key: results[key] for key in keys}
    # Keys that are missing from the results of an earlier version take their default values.
    if not results["complete"] or bind(Study, recorded) != read_study(described):
        raise InputError(
            f"{file.parent} must contain the finished study; delete the folder and run {command}"
        )
    rows = {row["variant"]: row for row in results["rows"]}
    table = comparison(results).astype(object).where(lambda frame: frame.notna(), None)
    lines = {line["variant"]: line for line in table.to_dict("records")}
    book, content = RecordBook(file.parent), {}
    for name, variant in what.runs.items():
        keys = rows[variant]["runs"]
        content[name] = {
            "command": command,
            "runs_sha256": keys,
            "losses": rows[variant]["losses"],
            **lines[variant],
        }
        if what.series:
            records = zip(results["seeds"], keys, strict=True)
            content[name]["seeds"] = {
                str(seed): {"series": trained_series(book[key], output, what.series)}
                for seed, key in records
            }
    return content


def trained_series(record: Record, output: Path, series: Mapping[str, str]) -> dict[str, Series]:
    """Return the metric series of a study's run. The run folder is in `output`.

    Raises InputError if the folder's config or loss does not match the record.
    """
    name, *overrides = record.settings
    folder = output / Run(record.label, name, tuple(overrides)).folder
    again = "the study again, without this run's line in runs.jsonl"
    check_config(folder, again, ROOT / name, overrides)
    run = read_run(folder)
    losses = [line["val/loss"] for line in run.metrics if "val/loss" in line]
    if losses[-1:] != [record.loss]:
        raise InputError(
            f"the last loss in {folder} must equal the recorded loss {record.loss}, got {losses}"
        )
    return {key: series_of(run, text) for key, text in series.items()}


def trains(command: str) -> bool:
    """Return whether a command runs training."""
    return "pretrain.py" in shlex.split(command)


def arguments(command: str) -> tuple[Path, list[str]]:
    """Return the config file and overrides of a training command."""
    words = shlex.split(command)
    at = words.index("--config")
    return ROOT / words[at + 1], words[at + 2 :]


def provenance(folder: Path, command: str) -> dict[str, Any]:
    """Return the provenance of a run: config hash, versions and last step."""
    from models.engine import import_engine  # deferred: slow import

    import_engine()
    from training.checkpoint.checkpoints import read_checkpoint

    config, saved = check_config(folder, command, *arguments(command)), folder / "config.yaml"
    checkpoint = read_checkpoint(folder)
    last = config.train.last
    if checkpoint.step != last:
        raise InputError(f"{folder} must end at step {last}, got step {checkpoint.step}")
    return {
        "config_sha256": hashlib.sha256(saved.read_bytes()).hexdigest(),
        "versions": checkpoint.meta["versions"],
        "steps": last,
    }


def check_config(folder: Path, command: str, file: Path, overrides: Sequence[str]) -> Config:
    """Load the config `file` with `overrides`. Raises InputError if the run in `folder` used a
    different config."""
    config, saved = load_config(file, overrides), folder / "config.yaml"
    if not saved.is_file():
        raise InputError(f"{folder} must contain a finished run; run {command}")
    expected, actual = asdict(config), asdict(load_saved_config(saved))
    # The run's config contains the vocabulary size of the data, and the run's folder may have been
    # moved.
    expected["model"]["vocab_size"] = actual["model"]["vocab_size"]
    expected["run"]["dir"] = actual["run"]["dir"]
    if expected != actual:
        raise InputError(
            f"{folder} was trained with a different config; delete the folder and run {command}"
        )
    return config


def series_of(run: RunData, text: str) -> Series:
    """Return the metric specified by `text` (see `Measure`) at each step."""
    over, figure, *rest = text.split()
    if over == "metric":
        series = {
            line["step"]: line[figure] for line in run.metrics if line.get(figure) is not None
        }
    else:
        lines = ((line["step"], list(values(run, line, figure, *rest))) for line in run.monitors)
        series = {step: OVER[over](each) for step, each in lines if each}
    if not series:
        raise InputError(f"{run.folder} contains no values of `{text}`")
    return {step: float(f"{value:.{DIGITS}g}") for step, value in series.items()}


def values(
    run: RunData, line: Line, figure: str, role: str, layer: str | None = None
) -> Iterator[float]:
    """Yield the values of a metric for a role's matrices, or for all blocks, from a line of
    monitors.jsonl."""
    records = line["blocks"].values() if role == "blocks" else run.units(line, role)
    for record in records:
        if layer is not None and record["layer"] != int(layer):
            continue
        if figure.startswith("quantile_"):
            quantiles = record.get("effective_quantiles") or record["quantiles"]
            yield quantiles[int(figure.removeprefix("quantile_")) // 10] / quantiles[-1]
        elif record.get(figure) is not None:
            yield record[figure]


def runs_of(run: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return a run's results by seed, under the key "" for a run without seeds."""
    return dict(run["seeds"]) if "seeds" in run else {"": run}


def statistics_table(content: Mapping[str, Any]) -> pd.DataFrame:
    """Return a row for each variant of a study, and a row for each series of each run and seed.

    Column `early` is the mean over the first fifth of the steps, and `settled` is the mean over the
    second half.
    """
    lines = []
    for name, run in content.items():
        if "losses" in run:
            figures = ("loss", "error", "difference", "difference_error", "low", "high")
            lines.append({"run": name} | {key: run.get(key) for key in figures})
            if "seeds" not in run:
                continue
        for seed, results in runs_of(run).items():
            for series, values in results["series"].items():
                line = {"run": name, "seed": seed, "series": series}
                lines.append(line | statistics_of(values))
    return pd.DataFrame(lines)


def statistics_of(series: Mapping[str, float]) -> dict[str, float]:
    """Return a series' summary statistics, for use in papers.yaml."""
    values = pd.Series([*series.values()])
    return {
        "first": values.iloc[0],
        "last": values.iloc[-1],
        "least": values.min(),
        "greatest": values.max(),
        "mean": values.mean(),
        "median": values.median(),
        "early": values[: max(len(values) // 5, 1)].mean(),
        "settled": values[len(values) // 2 :].mean(),
    }


def to_json(content: Mapping[str, Mapping[str, Any]]) -> str:
    """Format results as JSON with one line per key of a run."""
    runs = []
    for name, run in content.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in run.items()]
        runs.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(runs) + "\n}\n"
