"""One page about several runs: a table of all of them, and their curves overlaid."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from scripts.plots.run_data import RunData, RunStatus, read_run, run_status
from scripts.plots.run_figures import FIGURES
from scripts.plots.run_page import PageSection, figure_sections, key_figures, page, subtitle
from training.config.yaml_files import flat
from training.errors import InputError

OVERLAID = ("loss", "gradient_norm", "quantiles", "attention_logits", "maxvio", "penalty")
"""Figures of the page, with one colour per run."""

COLUMNS = ("best validation", "training loss", "tokens", "tokens / second", "time of stepping")
"""Figures of a run in the table, in addition to the metric that orders the runs."""

MOST = 12
"""Number of runs in a figure: those with the lowest validation loss (or training loss if no run
validates)."""

SHOWN_KEYS = 8
"""Number of differing config keys that the table names."""

ABOUT = (
    "Ordered by {}. Below each run: its model, and its values of the keys in which configs differ. "
    "A small difference of two runs may be chance: scripts/study.py compares over several seeds."
)

UNCOMPARED = re.compile(r"run\.(dir|name)|data\.(train|validation)\..*\.path|(log|plan)\..*")
"""Keys without effect on training."""


LOSS = ("val/loss", "validation loss")
BITS = ("val/bpb", "bits per byte")
"""Metrics that order runs, with the headings of their columns."""


def measure(runs: Sequence[RunData]) -> tuple[str, str]:
    """Return the metric that orders the runs: nats per token only if all runs have one
    vocabulary."""
    vocabularies = {run.config["model"].get("vocab_size") for run in runs}
    complete = all(run.series(BITS[0]) for run in runs if run.series(LOSS[0]))
    return BITS if len(vocabularies) > 1 and complete else LOSS


@dataclass(frozen=True)
class Compared:
    """A run and its row of the table; `settings` are the keys in which the runs differ."""

    run: RunData
    settings: list[str]
    metric: str
    heading: str

    @cached_property
    def status(self) -> RunStatus:
        """The status of the run."""
        return run_status(self.run)

    @property
    def about(self) -> str:
        """Its model."""
        return subtitle(self.run)

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """The sort key of the run: first by the metric, then by training loss, and runs with
        neither last."""
        for missing, name in ((False, self.metric), (True, "train/loss")):
            series = self.run.series(name)
            if series:
                return False, missing, series[-1][1]
        return True, True, 0.0

    @property
    def figures(self) -> dict[str, str]:
        """The value of each column."""
        cards = dict(key_figures(self.run, self.metric))
        names = {self.heading: "validation loss"} | {name: name for name in COLUMNS}
        return {name: cards.get(key, "-") for name, key in names.items()}


def find_runs(folder: Path, around: Path) -> list[RunData]:
    """Return the runs in a folder and its subfolders; the name is the path within `around`.

    Raises InputError if there are none, or one of them cannot be read.
    """
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    runs = []
    for place, inside, files in os.walk(folder):
        if "metrics.jsonl" in files and "config.yaml" in files:
            path = Path(place)
            label = path.absolute().relative_to(around.absolute()).as_posix()
            runs.append(read_run(path, None if label == "." else label))
            inside.clear()  # checkpoints have configs too
    if not runs:
        raise InputError(f"{folder} must contain a run: no folder in it contains a metrics.jsonl")
    return runs


def comparison(around: Path, folders: Sequence[Path]) -> str:
    """Return the page about the runs in `folders`, which are in the folder `around`."""
    found_in = {run.name: run for folder in folders for run in find_runs(folder, around)}
    runs = [found_in[name] for name in sorted(found_in)]
    order = measure(runs)
    differing = differences([run.config for run in runs])
    rows = (Compared(run, unlike, *order) for run, unlike in zip(runs, differing, strict=True))
    compared = sorted(rows, key=lambda each: each.rank)
    logged = [each.run for each in compared if each.run.metrics]
    less = f" The best {MOST} of {len(logged)} runs." if len(logged) > MOST else ""
    about = ABOUT.format(compared[0].heading)
    overlays = ((each, each.overlay) for each in FIGURES if each.name in OVERLAID and logged)
    sections = [
        PageSection("runs", "Runs", about, "runs", compared),
        *figure_sections(((kind, draw(logged[:MOST])) for kind, draw in overlays if draw), less),
    ]
    for each in compared:
        if each.status.kind == "failed":
            name, heading = f"failure-{len(sections)}", f"Why {each.run.name} failed"
            sections.append(PageSection(name, heading, "", "reason", each.status, menu=False))
    kinds = [each.status.kind for each in compared]
    counts = [(kind, str(kinds.count(kind))) for kind in dict.fromkeys(kinds)]
    return page(around.resolve().name, f"{len(runs)} runs", cards=counts, sections=sections)


def differences(configs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return, for each config, `key value` of the keys in which the configs differ.

    A section that some configs lack counts as one key.
    """
    values = [dict(flat(read_sections(config))) for config in configs]
    keys = [
        key
        for key in dict.fromkeys(k for each in values for k in each)
        if not UNCOMPARED.fullmatch(key)
    ]
    unlike = [key for key in keys if len({str(each.get(key)) for each in values}) > 1]
    for section in {key for config in configs for key, value in config.items() if value is None}:
        inside = [key for key in unlike if key.startswith(f"{section}.")]
        unlike = [key for key in unlike if key not in inside[1:]]
    unlike.sort(key=_section)  # stable
    rows = []
    for each in values:
        texts = [f"{key} {each[key]}" for key in unlike if each.get(key) is not None]
        more = [f"and {len(texts) - SHOWN_KEYS} more"] if len(texts) > SHOWN_KEYS else []
        rows.append([*texts[:SHOWN_KEYS], *more])
    return rows


def read_sections(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config` without the settings of rules that the run does not use."""
    optimizer = config["optimizer"]
    sections = [*optimizer.values(), *(optimizer.get("roles") or {}).values()]
    used = {each["rule"] for each in sections if isinstance(each, dict) and "rule" in each}
    rules = {name: each for name, each in (optimizer.get("rules") or {}).items() if name in used}
    return {**config, "optimizer": {**optimizer, "rules": rules}}


def _section(key: str) -> int:
    """Return the rank of a key's section: the most telling sections come first."""
    first = ("model", "optimizer", "pc", "gram_penalty", "schedule", "train", "data")
    section = key.split(".")[0]
    return first.index(section) if section in first else len(first)
