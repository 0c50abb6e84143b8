"""The page that compares several runs, with a table of all runs and overlaid curves."""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from scripts.command import warn
from scripts.plots.run_data import RunData, RunStatus, read_run, run_status
from scripts.plots.run_figures import FIGURES
from scripts.plots.run_page import PageSection, figure_sections, key_figures, page, subtitle
from training.config.data import MEAN, MEASURED, rounded_mean_weights
from training.config.yaml_files import flat
from training.errors import InputError

OVERLAID = ("loss", "gradient_norm", "quantiles", "attention_logits", "maxvio", "penalty")
"""Figures on the page, with one colour per run."""

COLUMNS = ("best validation", "training loss", "tokens", "tokens / second", "training time")
"""Table columns, in addition to the metric that runs are sorted by."""

MOST = 12
"""Maximum number of runs per figure. The runs with the lowest validation loss are drawn. If no run
has a validation loss, the runs with the lowest training loss are drawn."""

SHOWN_KEYS = 8
"""Maximum number of differing config keys to list per run."""

CHANGED = re.compile(r"changed since step \d+: (?!commit |fingerprint )(.*?) was ")
"""Text of an event about a setting that changed when a run resumed."""

ABOUT = (
    "Sorted by {}. Each run is followed by its model and the config keys that differ between runs. "
    "Small differences may be due to chance; use scripts/study.py to compare several seeds."
)

UNCOMPARED = re.compile(r"run\.(dir|name)|data\.(train|validation)\..*\.path|(log|plan)\..*")
"""Keys that do not affect training. Datasets are compared by content rather than by path."""

UNLIKE = "The validation losses of these runs are not comparable, because the runs differ in {}."
UNRECORDED = (
    "The tokenizers of these runs are not recorded, so their validation losses may not be "
    "comparable: {}."
)


LOSS = ("val/loss", "validation loss")
BITS = ("val/bpb", "bits per byte")
"""Metrics that runs can be sorted by, with their column headings."""


def measure(runs: Sequence[RunData]) -> tuple[str, str]:
    """Return the metric to sort runs by, with its column heading.

    The metric is bits per byte if tokenizers differ and all validated runs logged bits per byte.
    Otherwise, the metric is nats per token.
    """
    complete = all(run.series(BITS[0]) for run in runs if run.series(LOSS[0]))
    return BITS if unlike_tokenizers(runs) and complete else LOSS


def unlike_tokenizers(runs: Sequence[RunData]) -> bool:
    """Return whether tokenizers or vocabulary sizes differ between runs."""
    sizes = {run.config["model"].get("vocab_size") for run in runs}
    return len(sizes) > 1 or len({run.contents.get("tokenizer") for run in runs} - {None}) > 1


def warn_of_unlike(
    runs: Sequence[RunData], configs: Sequence[dict[str, Any]], metric: str
) -> list[str]:
    """Print warnings about settings that make `metric` incomparable across validated runs, and
    about validated runs whose tokenizer is not recorded. Return the texts of the warnings.

    `configs` are the results of `with_contents` for `runs`.
    """
    pairs = zip(runs, configs, strict=True)
    validated = [(run, config) for run, config in pairs if run.series(metric)]
    keys = unlike_keys([settings_in_use(config) for _, config in validated])
    reasons = [key for key in keys if MEASURED.fullmatch(key)]
    if len({str(_weights_of(config)) for _, config in validated}) > 1:
        reasons.append(MEAN)
    if metric == LOSS[0] and unlike_tokenizers([run for run, _ in validated]):
        reasons.append("tokenizer")
    texts = [UNLIKE.format(", ".join(reasons))] if reasons else []
    unrecorded = [run.name for run, _ in validated if not run.contents]
    if metric == LOSS[0] and len(validated) > 1 and unrecorded:
        texts.append(UNRECORDED.format(", ".join(unrecorded)))
    for text in texts:
        warn(text)
    return texts


def _weights_of(config: dict[str, Any]) -> list[tuple[str, float]]:
    """Return each validation set's weight in the mean loss, for a run's config."""
    data = config.get("data", {})
    mixture = {name: each.get("weight", 1.0) for name, each in (data.get("train") or {}).items()}
    return sorted(rounded_mean_weights(data.get("validation") or {}, mixture).items())


def with_contents(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return each run's config, with a key `content` added to every dataset.

    `content` is the dataset's hash. If any run is from a version that did not record hashes,
    `content` is the dataset's path in all runs.
    """
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
    """A run's table row.

    settings  the keys that differ between runs, as `key value`, and the keys that the run changed
              when it resumed
    figures   the run's value for each column
    """

    run: RunData
    settings: list[str]
    figures: dict[str, str]

    @cached_property
    def status(self) -> RunStatus:
        """Status of the run."""
        return run_status(self.run)

    @property
    def about(self) -> str:
        """Description of the run's model."""
        return subtitle(self.run)


def rank(run: RunData, metric: str) -> tuple[bool, bool, float]:
    """Return a run's sort key: the metric or, if missing, the training loss. Runs with the metric
    come first, and runs without a finite value come last."""
    for missing, name in ((False, metric), (True, "train/loss")):
        value = run.last(name)
        if value is not None:
            finite = math.isfinite(value)
            return not finite, missing, value if finite else 0.0
    return True, True, 0.0


def column_values(run: RunData, metric: str, heading: str) -> dict[str, str]:
    """Return a run's value for each column. `heading` is the column heading of `metric`."""
    cards = dict(key_figures(run, metric))
    names = {heading: "validation loss"} | {name: name for name in COLUMNS}
    return {name: cards.get(key, "-") for name, key in names.items()}


def changed_midway(run: RunData) -> list[str]:
    """Return an entry that lists the settings a run changed when it resumed, or [] if there are
    none. Continuations that a later start has replaced are not counted."""
    found: list[tuple[int, str]] = []
    for event in run.events:
        if event["kind"] in ("started", "continued"):
            found = [each for each in found if each[0] < event["step"]]
        elif match := CHANGED.match(event["text"]):
            found.append((event["step"], match[1]))
    keys = list(dict.fromkeys(key for _, key in found))
    more = f" and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else ""
    return [f"changed midway: {', '.join(keys[:SHOWN_KEYS])}{more}"] if keys else []


def find_runs(folder: Path, base: Path) -> list[RunData]:
    """Return all runs in a folder and its subfolders, labelled by their path relative to `base`.
    A run without config.yaml or metrics.jsonl is left out with a warning.

    Raises InputError if there are no runs, or if a run cannot be read.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} must be an existing folder")
    runs = []
    seen: set[str] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(parent)) in seen:
            folders.clear()  # already visited through another symlink, or a cycle
            continue
        seen.add(real)
        logged, configured = "metrics.jsonl" in files, "config.yaml" in files
        if not logged and not (configured and "checkpoints" in folders):
            continue  # not a run
        if logged and configured:
            path = Path(parent)
            label = path.absolute().relative_to(base.absolute()).as_posix()
            runs.append(read_run(path, None if label == "." else label))
        else:
            missing = "config.yaml" if logged else "metrics.jsonl"
            warn(f"left out {parent}, which has no {missing}")
        if configured:
            folders.clear()  # checkpoints contain configs, too
    if not runs:
        raise InputError(f"{folder} contains no run folder (metrics.jsonl and config.yaml)")
    return runs


def comparison(base: Path, folders: Sequence[Path]) -> str:
    """Return the page that compares all runs in `folders`, which must be inside `base`."""
    found_in = {run.name: run for folder in folders for run in find_runs(folder, base)}
    runs = [found_in[name] for name in sorted(found_in)]
    metric, heading = measure(runs)
    configs = with_contents(runs)
    differing = differences(configs)
    rows = (
        Compared(run, [*keys, *changed_midway(run)], column_values(run, metric, heading))
        for run, keys in zip(runs, differing, strict=True)
    )
    compared = sorted(rows, key=lambda each: rank(each.run, metric))
    logged = [each.run for each in compared if each.run.metrics]
    less = f" Only the best {MOST} of {len(logged)} runs are shown." if len(logged) > MOST else ""
    about = " ".join([*warn_of_unlike(runs, configs, metric), ABOUT.format(heading)])
    overlays = ((each, each.overlay) for each in FIGURES if each.name in OVERLAID)
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
    return page(base.resolve().name, f"{len(runs)} runs", cards=counts, sections=sections)


def differences(configs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """For each config, return a list of its values for the keys that differ between configs.

    Each value has the form `key value`. A section that is null in some of the configs counts as a
    single key.
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
    """Return the keys that affect training and whose values differ.

    `values` contains the result of `settings_in_use` for each config.
    """
    keys = dict.fromkeys(key for each in values for key in each if not UNCOMPARED.fullmatch(key))
    return [key for key in keys if len({str(each.get(key)) for each in values}) > 1]


def settings_in_use(config: dict[str, Any]) -> dict[str, Any]:
    """Flatten `config` to a dict with dotted keys, dropping rules that no role uses."""
    optimizer = config["optimizer"]
    sections = [*optimizer.values(), *(optimizer.get("roles") or {}).values()]
    used = {each["rule"] for each in sections if isinstance(each, dict) and "rule" in each}
    rules = {name: each for name, each in (optimizer.get("rules") or {}).items() if name in used}
    return dict(flat({**config, "optimizer": {**optimizer, "rules": rules}}))


def _section(key: str) -> int:
    """Return a key's sort position by section, with the most informative sections first."""
    first = ("model", "optimizer", "pc", "gram_penalty", "schedule", "train", "data")
    section = key.split(".")[0]
    return first.index(section) if section in first else len(first)
