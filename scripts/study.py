"""Runs the variants of a study with several seeds and compares them, with error bars.

    python scripts/study.py studies/pc_tiny.yaml runs/studies/pc_tiny
    python scripts/study.py studies/pc_tiny.yaml runs/studies/pc_tiny --jobs 2 train.steps=50

A study is a YAML file: `title`, `seeds`, `overrides` for every run, and `variants` by name, each
with a `config`, its own `overrides` and the variant it is compared `against`. Each run is
`pretrain.py` in a process of its own with one thread; a run that has ended is not repeated, so the
same command goes on with an interrupted study. results.json and table.md appear in the folder.

The figure of a run is its last validation loss (nats per token), the mean over its validation sets.
A seed sets both the initial weights and the order of the data. Variants are compared seed by seed:
the difference is the mean over seeds of their losses' difference, its error the standard error of
that mean, s / sqrt(n), which with three seeds is itself uncertain by half.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from training.errors import ConfigError, InputError, print_error  # noqa: E402
from training.lifecycle.run_folder import DONE, mark_done  # noqa: E402
from training.report.metrics import read_metrics  # noqa: E402
from training.report.table import table  # noqa: E402


@dataclass(frozen=True)
class Variant:
    """One way to train; `against` names the variant it is compared with."""

    config: str
    overrides: list[str] = field(default_factory=list)
    against: str | None = None


@dataclass(frozen=True)
class Study:
    """Variants to compare, over the same seeds and with the same `overrides` first."""

    title: str
    seeds: list[int]
    variants: dict[str, Variant]
    overrides: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """What the seeds of one variant say: losses in nats per token, `against`'s subtracted from them
    in `difference`; `error` and `difference_error` are standard errors of means."""

    variant: str
    losses: list[float]
    loss: float
    error: float
    against: str | None = None
    difference: float | None = None
    difference_error: float | None = None


def read_study(path: Path) -> Study:
    """The study of a file. Raises ConfigError for one that is not a study."""
    if not path.is_file():
        raise ConfigError(f"study must be a file, got {path}")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        variants = {name: Variant(**each) for name, each in content.pop("variants").items()}
        study = Study(variants=variants, **content)
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} must have title, seeds and variants: {error}") from error
    for name, variant in study.variants.items():
        if variant.against is not None and variant.against not in variants:
            raise ConfigError(f"{path}: {name} is against {variant.against}, which is no variant")
    if len(set(study.seeds)) < 2:
        raise ConfigError(f"{path}: seeds must be two or more different ones, got {study.seeds}")
    return study


def run_folder(output: Path, variant: str, seed: int) -> Path:
    """Where one run of a study lies."""
    name = "".join(c if c.isalnum() or c in ".-" else "_" for c in variant)
    return output / f"{name}-{seed}"


def validation_loss(folder: Path) -> float | None:
    """The last validation loss of a run that has ended, the mean over its sets, else None."""
    if not (folder / DONE).exists():
        return None
    losses = [line["val/loss"] for line in read_metrics(folder) if "val/loss" in line]
    return losses[-1] if losses else None


class RunFailedError(InputError):
    """A run of a study that ended without a loss. `not_finite` is whether that was because its
    loss or gradient no longer was finite."""

    def __init__(self, message: str, not_finite: bool) -> None:
        super().__init__(message)
        self.not_finite = not_finite


def run(study: Study, name: str, seed: int, output: Path, overrides: Sequence[str]) -> float:
    """The loss of one run, trained now unless it has ended with the same settings before.

    Raises RunFailedError if it fails.
    """
    folder, variant = run_folder(output, name, seed), study.variants[name]
    settings = [variant.config, *study.overrides, *variant.overrides, *overrides, f"seed={seed}"]
    asked = folder / "settings.json"
    stale = asked.is_file() and json.loads(asked.read_text(encoding="utf-8")) != settings
    found = None if stale else validation_loss(folder)
    if found is not None:
        return found
    command = [sys.executable, str(ROOT / "pretrain.py"), "--config", str(ROOT / variant.config)]
    command += [*settings[1:], f"run.dir={folder}", *(["--resume", "none"] if stale else [])]
    folder.mkdir(parents=True, exist_ok=True)
    mark_done(folder, False)
    asked.write_text(json.dumps(settings) + "\n", encoding="utf-8")
    log = folder / "log.txt"
    with log.open("w", encoding="utf-8") as console:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        code = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=console, stderr=console, check=False
        ).returncode
    found = validation_loss(folder)
    if code != 0 or found is None:
        last = (log.read_text(encoding="utf-8").strip().splitlines() or ["nothing"])[-1]
        raise RunFailedError(
            f"{name}, seed {seed}, ended with {code} and without a loss: {last}",
            code == 1 and "not finite" in last,
        )
    print(f"{name}, seed {seed}: {found:.4f}", flush=True)
    return found


def compare(study: Study, losses: Mapping[str, Sequence[float]]) -> list[Row]:
    """A row per variant; `losses` by variant, in the order of the seeds."""
    rows = []
    for name, variant in study.variants.items():
        mine = losses[name]
        row = Row(name, list(mine), statistics.mean(mine), standard_error(mine))
        if variant.against is not None:
            pairs = zip(mine, losses[variant.against], strict=True)
            differences = [a - b for a, b in pairs]
            row = Row(
                name,
                row.losses,
                row.loss,
                row.error,
                variant.against,
                statistics.mean(differences),
                standard_error(differences),
            )
        rows.append(row)
    return rows


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of independent values."""
    return statistics.stdev(values) / sqrt(len(values))


def markdown(rows: Sequence[Row]) -> str:
    """The table of a study."""
    lines = ["| variant | validation loss | difference | from |", "|---|---|---|---|"]
    for row in rows:
        difference = ""
        if row.difference is not None:
            difference = f"{row.difference:+.4f} ± {row.difference_error:.4f}"
        lines.append(
            f"| {row.variant} | {row.loss:.4f} ± {row.error:.4f} | {difference} "
            f"| {row.against or ''} |"
        )
    return "\n".join(lines) + "\n"


def write(output: Path, study: Study, rows: Sequence[Row], overrides: Sequence[str]) -> None:
    """Write results.json and table.md."""
    content: dict[str, Any] = {**asdict(study), "command_overrides": list(overrides)}
    content["rows"] = [asdict(row) for row in rows]
    (output / "results.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (output / "table.md").write_text(markdown(rows), encoding="utf-8")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path, help="YAML file of the study")
    parser.add_argument("output", type=Path, help="folder of its runs and results")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("override", nargs="*", help="section.key=value of every run's config")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code."""
    options = parse(arguments)
    output = options.output.absolute()
    try:
        study = read_study(options.study)
        # Seed by seed, so that an interrupted study has whole seeds.
        runs = [(name, seed) for seed in study.seeds for name in study.variants]
        with ThreadPoolExecutor(options.jobs) as pool:
            found = pool.map(
                lambda each: run(study, each[0], each[1], output, options.override), runs
            )
            by_run = dict(zip(runs, found, strict=True))
    except InputError as error:
        print_error(error)
        return 2
    losses = {name: [by_run[name, seed] for seed in study.seeds] for name in study.variants}
    rows = compare(study, losses)
    write(output, study, rows, options.override)
    print(
        table(
            ("variant", "loss", "+-", "difference", "+-", "from"),
            [
                (
                    row.variant,
                    f"{row.loss:.4f}",
                    f"{row.error:.4f}",
                    "" if row.difference is None else f"{row.difference:+.4f}",
                    "" if row.difference_error is None else f"{row.difference_error:.4f}",
                    row.against or "",
                )
                for row in rows
            ],
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
