"""Rehearse recipes on the GPUs that they name, as they are and with their model cut.

    python scripts/rehearse_recipes.py configs/*.yaml --json benchmarks/results/rehearsals.json

Each recipe is rehearsed (docs/rehearsal.md) on its plan.gpus of its plan.device, once with its own
layout and once for each of `--cuts`, which sets that axis to 2. Layouts that a recipe may not have
are named at once. Of the others own layouts come first, then one recipe of every model family and
matrix rule with each cut, then the rest; small ones before large ones. FILE is written after every
rehearsal. Started again, the command keeps what FILE has of rehearsals that passed and of layouts
that a recipe may not have, if config and engine are still the same, and goes on with the others.

Exits with 1 if a rehearsal says that a run would break.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from models.engine import engine_version, import_quietly

import_quietly()

from parallel.plan.devices import device_named
from scripts.bench.record import record, write_json
from scripts.command import add_json, command
from training.build import on_mock_tokens
from training.config import Config, InvalidConfigError, check, load_config
from training.config.files import read_merged
from training.errors import ConfigError, InputError
from training.json_file import read_json
from training.machine.facts import commit
from training.rehearsal.guard import GuardError
from training.rehearsal.processes import Processes, RehearsalError
from training.rehearsal.rehearse import rehearse
from training.rehearsal.report import Report
from training.report.table import table

CUTS: Final = ("tensor", "pipeline", "context", "expert")
OWN: Final = ""
PASSED, BREAKS, MAY_NOT = "passed", "breaks", "may not"
EFFORT: Final = {"adamw": 1, "muon": 2, "muon_sphere": 4, "spectral_sphere": 6}
"""How long the step of a rule takes to rehearse, against the others."""


@dataclasses.dataclass
class Row:
    """One recipe in one layout.

    cut        axis that is set to 2, empty for the recipe's own layout
    outcome    passed, breaks, or may not
    reason     first error, or the rule by which the recipe may not have the layout
    ranks      that were rehearsed: the first of every pipeline stage
    seconds, processor_seconds   that it took, by the clock and of processors
    peak_gib, planned_gib   most memory of a rank, and what the planner foretold
    step_gib   most memory of a step on which nothing is due
    modelled_seconds, launches, host_reads, synchronizations   of such a step
    optimizer_seconds   of these, the optimizer's
    settings            hash of the recipe, its bases and the version of megatron-core
    """

    recipe: str
    cut: str
    gpus: int
    device: str
    outcome: str
    reason: str = ""
    ranks: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    peak_gib: float = 0.0
    step_gib: float = 0.0
    planned_gib: float = 0.0
    modelled_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    launches: int = 0
    host_reads: int = 0
    synchronizations: int = 0
    commit: str | None = None
    settings: str = ""


def settings_of(path: Path) -> str:
    """The hash by which a row is known to be of this recipe as it is."""
    content = json.dumps([read_merged(path), engine_version()], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def gpus_of(config: Config) -> int:
    """The GPUs that a config names. Raises InputError if it names none."""
    if config.plan.gpus is None:
        raise InputError(f"plan.gpus of {config.run.name} must be set, got null")
    return config.plan.gpus


def planned(path: Path, cut: str) -> Config:
    """The config of a recipe on made tokens, on its own GPUs, with an axis cut in two.

    Raises InvalidConfigError for what it may not.
    """
    config = load_config(path, [f"parallel.{cut}=2"] if cut else [])
    config = on_mock_tokens(config)
    check(config, gpus_of(config))
    return config


def in_order(paths: Iterable[Path], cuts: Sequence[str]) -> list[tuple[Path, str]]:
    """What is rehearsed: recipes with their own layout, then one of each family and rule with
    every cut, then the others; what takes less time first."""
    configs = {path: load_config(path) for path in paths}

    def effort(path: Path) -> int:
        config = configs[path]
        return config.model.layers * EFFORT.get(config.optimizer.matrix.rule, 4)

    small_first = sorted(configs, key=lambda path: (effort(path), path.stem))
    first: dict[tuple[str, str], Path] = {}
    for path in small_first:
        if not path.stem.startswith("tiny"):
            kind = configs[path].model.family, configs[path].optimizer.matrix.rule
            first.setdefault(kind, path)
    chosen = [path for path in small_first if path in first.values()]
    others = [path for path in small_first if path not in first.values()]
    cut = [(path, cut) for some in (chosen, others) for path in some for cut in cuts]
    return [(path, OWN) for path in small_first] + cut


def row_of(path: Path, cut: str) -> Row:
    """The row of a recipe that is not rehearsed yet."""
    config = load_config(path)
    gpus, device = gpus_of(config), config.plan.device
    return Row(path.stem, cut, gpus, device, BREAKS, commit=commit(), settings=settings_of(path))


def refused(path: Path, cut: str) -> Row | None:
    """The row of a layout that a recipe may not have, None if it may."""
    try:
        planned(path, cut)
    except InvalidConfigError as error:
        row = row_of(path, cut)
        row.outcome, row.reason = MAY_NOT if cut else BREAKS, "; ".join(error.problems)
        return row
    return None


def rehearsed(path: Path, cut: str, processes: Processes) -> Row:
    """Rehearse a recipe."""
    row, config = row_of(path, cut), planned(path, cut)
    start = time.monotonic()
    try:
        report = rehearse(
            config, gpus_of(config), device_named(config.plan.device), processes=processes
        )
    except RehearsalError as error:
        row.reason = str(error)
    else:
        fill(row, report)
    row.seconds = round(time.monotonic() - start, 1)
    return row


def fill(row: Row, report: Report) -> None:
    """Write down what a rehearsal found."""
    row.outcome = PASSED if report.ok else BREAKS
    row.reason = report.error or ""
    row.ranks = len(report.ranks)
    row.processor_seconds = round(report.processor_seconds, 1)
    row.peak_gib = round(report.peak_memory_bytes / 2**30, 3)
    row.planned_gib = round((report.planned or 0) / 2**30, 3)
    step = [report.phases[name] for name in ("forward_backward", "optimizer")]
    row.step_gib = round(max(counts.peak_memory_bytes for counts in step) / 2**30, 3)
    row.modelled_seconds = report.modelled_seconds
    row.optimizer_seconds = step[1].modelled_seconds
    for counts in step:
        row.launches += counts.launches
        row.host_reads += counts.host_reads.total()
        row.synchronizations += counts.synchronizations.total()


def kept(file: Path | None) -> dict[tuple[str, str], Row]:
    """Rows of a file, by recipe and cut. Raises InputError for another file."""
    if file is None or not file.exists():
        return {}
    try:
        rows = [Row(**row) for row in read_json(file)["rows"]]
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"--json must name a file that this command wrote: {file}") from error
    return {(row.recipe, row.cut): row for row in rows}


def tabled(rows: Iterable[Row], cuts: Sequence[str]) -> str:
    """A line for each recipe: peak GiB (processor seconds) in every layout, or what became of
    it."""
    by_recipe: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_recipe.setdefault(row.recipe, {})[row.cut] = row
    lines = [
        [recipe, *(cell(found.get(cut)) for cut in (OWN, *cuts))]
        for recipe, found in sorted(by_recipe.items())
    ]
    return table(["GiB (processor s)", "own layout", *(f"{cut} 2" for cut in cuts)], lines)


def cell(row: Row | None) -> str:
    """What the table says of one rehearsal."""
    if row is None:
        return "not yet"
    return (
        f"{row.peak_gib:.1f} ({row.processor_seconds:.0f})"
        if row.outcome == PASSED
        else row.outcome
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--cuts", nargs="*", choices=CUTS, default=CUTS, help="(default: all)")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="ranks at a time (default: 1)"
    )
    add_json(parser)
    return parser.parse_intermixed_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse, print and write the result."""
    options = parse(arguments)
    wanted = in_order(options.recipes, options.cuts)
    rows = kept(options.json)
    settings = {path.stem: settings_of(path) for path in options.recipes}
    for place, row in list(rows.items()):
        same = row.settings == settings.get(row.recipe)
        if row.recipe in settings and (row.outcome == BREAKS or not same):
            del rows[place]

    def add(row: Row | None) -> None:
        if row is None:
            return
        rows[row.recipe, row.cut] = row
        said = f"{row.outcome} {row.peak_gib:.2f} GiB {row.processor_seconds:.0f} s"
        print(f"{row.recipe} {row.cut or 'own'}: {said} {row.reason}", flush=True)
        figures = {"rows": [dataclasses.asdict(each) for each in rows.values()]}
        made = record("scripts/rehearse_recipes.py", arguments, torch.device("cpu"), figures)
        write_json(options.json, made)

    for path, cut in wanted:
        if (path.stem, cut) not in rows:
            add(refused(path, cut))
    try:
        with Processes(options.jobs) as processes:
            for path, cut in wanted:
                if (path.stem, cut) not in rows:
                    add(rehearsed(path, cut, processes))
    except GuardError as error:
        raise ConfigError(str(error)) from error
    print(tabled(rows.values(), options.cuts))
    for row in rows.values():
        if row.outcome != PASSED:
            print(f"{row.recipe} {row.cut or 'own'}: {row.outcome}: {row.reason}")
    return int(any(row.outcome == BREAKS for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
