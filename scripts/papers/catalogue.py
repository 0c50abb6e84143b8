"""The tables and figures in papers.yaml, with their commands and the GPU-hours of full runs.

GPU-hours are estimated by the planner and stored in gpu_hours.json for docs/papers.md.
"""

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import field
from pathlib import Path
from typing import Final, Literal, TypedDict

import yaml

from models.section import Section
from scripts.command import write_whole
from scripts.papers.measured import (
    ROOT,
    Measure,
    measure,
    seeded,
    statistics_table,
    to_json,
    trains,
)
from training.config import check, load_config
from training.config.binding import bind
from training.errors import InputError

HOURS_FILE: Final = Path(__file__).with_name("gpu_hours.json")


class Hours(TypedDict):
    """A run's GPU count and estimated GPU-hours."""

    gpus: int
    gpu_hours: float


def key_of(run: str) -> str:
    """Return a run's key in gpu_hours.json: `run` without overrides that do not affect its cost."""
    recipe, *overrides = shlex.split(run)
    kept = [each for each in overrides if not each.startswith(("run.", "seed="))]
    return " ".join([recipe, *kept])


def planned(run: str) -> Hours:
    """Estimate the GPU-hours of a run on the number of GPUs specified in its recipe."""
    # Deferred: these modules import megatron-core, which the page does not need.
    from training.dry_run import plan_run
    from training.planning.added_cost import run_hours

    recipe, *overrides = shlex.split(run)
    config = load_config(ROOT / "configs" / f"{recipe}.yaml", overrides)
    gpus = config.plan.gpus or 8
    check(config, gpus)
    plan = plan_run(config, gpus)
    return {"gpus": gpus, "gpu_hours": float(f"{run_hours(config, plan):.3g}")}


def read_hours() -> dict[str, Hours]:
    """Read gpu_hours.json."""
    stored: dict[str, Hours] = json.loads(HOURS_FILE.read_text(encoding="utf-8"))
    return stored


def write_hours(runs: Iterable[str]) -> None:
    """Estimate the GPU-hours of all runs and write gpu_hours.json."""
    table = {key: planned(key) for key in sorted({key_of(run) for run in runs})}
    HOURS_FILE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


FILE: Final = Path(__file__).resolve().with_name("papers.yaml")
Status = Literal[
    "reproduced", "contradicts", "cannot tell", "no claim", "not run", "nothing to run"
]


class Item(Section):
    """A table, a figure or, for a paper without tables and figures, a proposition.

    shows     what the item shows, in a few words
    status    status of our result (see docs/papers.md)
    tiny      commands for a laptop, in order; training commands run once per seed in `measure`
    full      runs at the paper's scale: recipes in configs/ with overrides
    plot      scripts/plot.py arguments that draw the item from the tiny runs
    full_plot scripts/plot.py arguments that draw the item from the full runs
    expected  the paper's numbers
    result    our result, starting with the name of the model
    file      committed file that contains the result or its test
    measure   values that `--measure` reads from the tiny runs and writes to `file`
    why       a remark, or why a command or result is missing
    """

    shows: str
    status: Status
    tiny: list[str] = field(default_factory=list)
    full: list[str] = field(default_factory=list)
    plot: str | None = None
    full_plot: str | None = None
    expected: str | None = None
    result: str | None = None
    file: str | None = None
    measure: Measure | None = None
    why: str | None = None

    def __post_init__(self) -> None:
        if self.status not in ("not run", "nothing to run") and self.result is None:
            raise ValueError(f"`result` must be set for status {self.status!r}, got null")
        if self.status == "nothing to run" and (self.tiny or self.full):
            raise ValueError(
                "`tiny` and `full` must be empty for status 'nothing to run', got "
                f"{self.tiny} and {self.full}"
            )
        if self.status in ("not run", "nothing to run") and self.why is None:
            raise ValueError(f"`why` must be set for status {self.status!r}, got null")
        if self.measure is not None and self.file is None:
            raise ValueError("`file` must be set for an item with `measure`, got null")


class Paper(Section):
    """A paper: its title, an optional note that applies to several results, and its tables, figures
    and propositions keyed by name, such as figure_1."""

    title: str
    note: str | None = None
    items: dict[str, Item]


class Catalogue(Section):
    """All papers by name."""

    papers: dict[str, Paper]


def read_catalogue() -> dict[str, Paper]:
    """Read papers.yaml. Raises InvalidConfigError listing every problem in the file."""
    return bind(Catalogue, yaml.safe_load(FILE.read_text(encoding="utf-8"))).papers


def full_command(run: str, gpus: int) -> list[str]:
    """Return the command for a full run: torchrun or, for more than 8 GPUs, a SLURM job."""
    recipe, *overrides = shlex.split(run)
    config = f"configs/{recipe}.yaml"
    if gpus > 8:
        folder = load_config(ROOT / config, overrides).run.dir
        job = [f"--nodes={gpus // 8}", f"--job-name={Path(folder).name}"]
        job.append(f"--export=ALL,RUN_DIR={folder}")  # read by pretrain.sbatch
        rest = [each for each in overrides if not each.startswith("run.dir=")]
        return ["sbatch", *job, "scripts/slurm/pretrain.sbatch", config, *rest]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*start, f"--nproc-per-node={gpus}", "pretrain.py", "--config", config, *overrides]


def write_measured(item: Item) -> None:
    """Write an item's result file from its finished tiny runs and print a table of the results.

    Raises InputError if the item has no `measure` or a run is missing.
    """
    if item.measure is None or item.file is None:
        rule = "--measure requires an item with `measure` in papers.yaml"
        raise InputError(f"{rule}, got {item.shows}")
    content = measure(item.measure, item.tiny)
    write_whole(ROOT / item.file, to_json(content))
    print(statistics_table(content).to_string(index=False))


def commands(item: Item, *, full: bool) -> list[list[str]]:
    """Return the commands of an item, replacing `python` with this interpreter."""
    if full:
        hours = read_hours()
        return [full_command(run, hours[key_of(run)]["gpus"]) for run in item.full]
    seeds = item.measure.seeds if item.measure is not None else []
    each = (run for text in item.tiny for run in (seeded(text, seeds) if trains(text) else [text]))
    split = map(shlex.split, each)
    return [[sys.executable if word == "python" else word for word in words] for words in split]


def plotting(item: Item, output: Path, *, full: bool) -> list[list[str]]:
    """Return a list with the command that draws the item, or an empty list if there is none."""
    arguments = item.full_plot if full else item.plot
    if arguments is None:
        return []
    return [
        [
            sys.executable,
            "scripts/plot.py",
            *shlex.split(arguments.format(output=output.as_posix())),
        ]
    ]


def describe(
    item: Item, runs: Sequence[Sequence[str]], drawing: Sequence[Sequence[str]], *, full: bool
) -> None:
    """Print what the item shows, the paper's numbers, our result, and the commands and costs."""
    print(f"shows: {item.shows}")
    for label, value in (
        ("paper's numbers", item.expected),
        ("our result", item.result),
        ("note", item.why),
    ):
        if value is not None:
            print(f"{label}: {value}")
    hours = read_hours()
    for index, each in enumerate(runs):
        time = f"  # {hours[key_of(item.full[index])]['gpu_hours']:,.0f} GPU-hours" if full else ""
        print(f"runs: {shlex.join(each)}{time}")
    for each in drawing:
        print(f"draws: {shlex.join(each)}")
