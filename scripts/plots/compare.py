"""One page about several runs: a table of all of them, and their curves overlaid."""

import os
import re
import sys
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
"""Number of runs in a figure: the runs with the lowest validation loss, or with the lowest training
loss if no run validates."""

SHOWN_KEYS = 8
"""Number of differing config keys that the table names."""

ABOUT = (
    "Ordered by {}. Below each run: its model, and its values of the keys in which configs "
    "differ. A small difference between two runs may be chance: scripts/study.py compares with "
    "several seeds."
)

UNCOMPARED = re.compile(r"run\.(dir|name)|data\.(train|validation)\..*\.path|(log|plan)\..*")
"""Keys without effect on training; sets are compared by `contents`."""

MEASURED = re.compile(
    r"data\.(validation\..*|document_mask|first_token_loss)|train\.sequence_length"
    r"|validation\.samples"
)
"""Keys on which a validation loss depends, apart from the model and its tokenizer."""

UNLIKE = (
    "Validation losses of these runs are measured differently and cannot be compared: they differ "
    "in {}."
)


LOSS = ("val/loss", "validation loss")
BITS = ("val/bpb", "bits per byte")
"""Metrics that order runs, with the headings of their columns."""


def measure(runs: Sequence[RunData]) -> tuple[str, str]:
    """Return the metric that orders the runs: nats per token, or bits per byte if tokenizers differ
    and all validated runs state it."""
    complete = all(run.series(BITS[0]) for run in runs if run.series(LOSS[0]))
    return BITS if unlike_tokenizers(runs) and complete else LOSS


def unlike_tokenizers(runs: Sequence[RunData]) -> bool:
    """Return whether two runs state other tokenizers, or vocabularies of other sizes."""
    sizes = {run.config["model"].get("vocab_size") for run in runs}
    return len(sizes) > 1 or len({run.contents.get("tokenizer") for run in runs} - {None}) > 1


def unlike_measurements(
    runs: Sequence[RunData], configs: Sequence[dict[str, Any]], metric: str
) -> list[str]:
    """Return the reasons why values of `metric` of validated runs cannot be compared."""
    validated = [i for i, run in enumerate(runs) if run.series(metric)]
    keys = unlike_keys([settings_in_use(configs[i]) for i in validated])
    reasons = [key for key in keys if MEASURED.fullmatch(key)]
    if metric == LOSS[0] and unlike_tokenizers([runs[i] for i in validated]):
        reasons.append("tokenizer")
    return reasons


def with_contents(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return the config of each run with the content of each set: its hash, or its path if a run
    of an earlier version does not state hashes."""
    known = all(run.contents for run in runs)
    configs = []
    for run in runs:
        data = dict(run.config["data"])
        for kind, prefix in (("train", ""), ("validation", "validation.")):
            data[kind] = {
                name: {**each, "content": run.contents.get(prefix + name, "?")[:12]}
                if known
                else {**each, "content": each["path"]}
                for name, each in (data.get(kind) or {}).items()
            }
        configs.append({**run.config, "data": data})
    return configs


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
        """The model of the run."""
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
    seen: set[str] = set()
    for place, inside, files in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            inside.clear()  # a link to a folder that is read elsewhere, or a cycle
            continue
        seen.add(real)
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
    configs = with_contents(runs)
    differing = differences(configs)
    rows = (Compared(run, unlike, *order) for run, unlike in zip(runs, differing, strict=True))
    compared = sorted(rows, key=lambda each: each.rank)
    logged = [each.run for each in compared if each.run.metrics]
    less = f" The best {MOST} of {len(logged)} runs." if len(logged) > MOST else ""
    about = ABOUT.format(compared[0].heading)
    if reasons := unlike_measurements(runs, configs, order[0]):
        about = f"{UNLIKE.format(', '.join(reasons))} {about}"
        print(f"warning: {UNLIKE.format(', '.join(reasons))}", file=sys.stderr)
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
    values = [settings_in_use(config) for config in configs]
    unlike = unlike_keys(values)
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


def unlike_keys(values: Sequence[dict[str, Any]]) -> list[str]:
    """Return the keys with an effect on training in which results of `settings_in_use` differ."""
    keys = dict.fromkeys(key for each in values for key in each if not UNCOMPARED.fullmatch(key))
    return [key for key in keys if len({str(each.get(key)) for each in values}) > 1]


def settings_in_use(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of `config` by dotted key, without those of rules that no role uses."""
    optimizer = config["optimizer"]
    sections = [*optimizer.values(), *(optimizer.get("roles") or {}).values()]
    used = {each["rule"] for each in sections if isinstance(each, dict) and "rule" in each}
    rules = {name: each for name, each in (optimizer.get("rules") or {}).items() if name in used}
    return dict(flat({**config, "optimizer": {**optimizer, "rules": rules}}))


def _section(key: str) -> int:
    """Return the rank of a key's section: the most telling sections come first."""
    first = ("model", "optimizer", "pc", "gram_penalty", "schedule", "train", "data")
    section = key.split(".")[0]
    return first.index(section) if section in first else len(first)
