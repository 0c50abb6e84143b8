"""Read a run folder's files for figures, and determine the run's status."""

import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from scripts.command import warn
from training.config.yaml_files import read_saved
from training.errors import InputError, near_name
from training.json_file import check_shape, read_json
from training.lifecycle.run_folder import DONE, HEARTBEAT, LOCK, began
from training.report.log_lines import read_lines

Line = dict[str, Any]
T = TypeVar("T")
ATTENTION = ("q_a", "q_b", "kv_a", "kv_b", "qkv", "q", "k", "v", "k_b", "v_b", "o", "router")
BLOCK = ("gate_up", "gate", "up", "down")
"""Roles of a layer's matrices in forward order: attention, then feed-forward."""

TOKENS = "progress/tokens"
NUMBER = int | float | None
METRICS = {...: NUMBER}
"""Shape of a metrics line without text samples, for `check_shape`."""
UNIT = {"role": str, "layer": int | None, ...: int | float | list | None}
MONITORS = {"units": {...: UNIT}, "blocks": {...: {...: NUMBER}}}
EVENTS = {"kind": str, "text": str, "time": str}
GROUP = {"rule": str, "lr": int | float, "weight_decay": int | float}
CONFIG = {
    "run": {"name": str},
    "model": dict,
    "data": {"train": {...: {"path": str}}},
    "train": {"steps": int, "global_batch": int, "sequence_length": int},
    "optimizer": dict.fromkeys(("matrix", "embedding", "head", "scalar"), GROUP),
    "schedule": dict,
    "parallel": dict,
    "monitors": dict,
}

Series = list[tuple[float, float]]
"""Points (x, y) in order."""


@dataclass(frozen=True)
class RunData:
    """The contents of a run folder: config.yaml, and the lines of metrics.jsonl, monitors.jsonl and
    events.jsonl."""

    folder: Path
    metrics: list[Line]
    monitors: list[Line]
    config: dict[str, Any]
    events: list[Line]
    label: str | None = None

    @property
    def name(self) -> str:
        """Name of the run in figures: its label or, by default, its folder name."""
        return self.label or self.folder.resolve().name

    @cached_property
    def contents(self) -> dict[str, str]:
        """Dataset and tokenizer hashes from data.json ({} for runs of earlier versions)."""
        found = _content(self.folder / "data.json").get("contents")
        named = found.items() if isinstance(found, dict) else ()
        return {name: each for name, each in named if isinstance(each, str)}

    @property
    def step(self) -> int:
        """The last logged step, or 0 if there is none."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    def series(self, metric: str, x: Callable[[Line], float] | None = None) -> Series:
        """Return the points (`x(line)`, value) of a metric. `x` defaults to the token count."""
        x = x or self.tokens
        return [(x(m), m[metric]) for m in self.metrics if m.get(metric) is not None]

    def curve(self, metric: str, x: Callable[[Line], float] | None = None) -> Series:
        """Return the points of `series`, with NaN where the metric was not finite. Lines drawn
        through these points have gaps there."""
        x = x or self.tokens
        lines = (line for line in self.metrics if metric in line)
        return [(x(m), math.nan if m[metric] is None else m[metric]) for m in lines]

    def last(self, metric: str) -> float | None:
        """Return the last logged value of a metric, NaN if it was not finite, or None if the metric
        was never logged."""
        values = [line[metric] for line in self.metrics if metric in line]
        return None if not values else math.nan if values[-1] is None else values[-1]

    def tokens(self, line: Line) -> float:
        """Return the number of training tokens at the step of a line.

        The number is interpolated between the counts in metrics and monitors, because the batch
        size may have changed during the run.
        """
        steps, tokens = self._counted
        train = self.config["train"]
        per_step = int(train["global_batch"] * train["sequence_length"])
        after = max(0, line["step"] - steps[-1]) * per_step
        return float(np.interp(line["step"], steps, tokens)) + after

    @cached_property
    def _counted(self) -> NDArray[np.float64]:
        """Steps and token counts `[2, n + 1]`: zeros, then a column per line with a token count."""
        tokens_at = {m["step"]: m[TOKENS] for m in self.metrics if TOKENS in m}
        monitored = {m["step"]: m.get("tokens") for m in self.monitors}
        tokens_at |= {step: tokens for step, tokens in monitored.items() if isinstance(tokens, int)}
        return np.array([(0, 0), *sorted(tokens_at.items())], dtype=np.float64).T.copy()

    def seconds(self, unit: float = 1.0) -> Callable[[Line], float]:
        """Return a function that maps a line to the total time of the training steps up to that
        line.

        The time is in units of `unit` seconds and excludes validation and checkpointing.
        """
        passed: dict[int, float] = {}
        total, before = 0.0, 0
        for line in self.metrics:
            seconds = line.get("perf/step_time_s")
            if seconds is not None:
                total += seconds * (line["step"] - before)
                before = line["step"]
            passed[line["step"]] = total
        return lambda line: passed[line["step"]] / unit

    def names(self, prefix: str) -> list[str]:
        """Return the names of all metrics with this prefix, in order of first occurrence."""
        return list(dict.fromkeys(k for m in self.metrics for k in m if k.startswith(prefix)))

    def units(self, line: Line, role: str | None = None) -> Iterator[Line]:
        """Yield the metrics of each matrix in a line of monitors.jsonl, for one or all roles."""
        for unit in line["units"].values():
            if role is None or unit["role"] == role:
                yield unit

    def samples(self, figure: str) -> int:
        """Return the number of gradients or updates from which a noise metric was last computed."""
        unit = next(u for line in reversed(self.monitors) for u in self.units(line) if figure in u)
        if figure.startswith("gradient"):
            return int(unit["noise_samples"])
        return int(self.config["monitors"]["noise_samples"])

    def roles(self) -> list[str]:
        """Return the monitored roles of matrices in layers, in forward order."""
        last = self.monitors[-1]["units"].values() if self.monitors else ()
        names = dict.fromkeys(u["role"] for u in last if u["layer"] is not None)
        return sorted(names, key=_place)


def read_run(folder: Path, label: str | None = None) -> RunData:
    """Read a run folder. metrics.jsonl may be empty.

    Raises InputError if metrics.jsonl or config.yaml is missing, or if a file contains unexpected
    values.
    """
    if not (folder / "metrics.jsonl").exists():
        raise InputError(
            f"a run must be a folder with metrics.jsonl, got {folder}; `python scripts/plot.py "
            f"compare {folder}` draws all runs in a folder{near_name(folder)}"
        )
    try:
        config = dict(read_saved(folder / "config.yaml"))
        check_shape(config, CONFIG, str(folder / "config.yaml"))
    except InputError as error:
        raise InputError(
            f"a run must be a folder with a valid config.yaml, got {folder}: {error}"
        ) from None
    metrics = _lines(folder / "metrics.jsonl", METRICS)
    monitors = _lines(folder / "monitors.jsonl", MONITORS)
    events = _lines(folder / "events.jsonl", EVENTS)
    return RunData(folder, metrics, monitors, config, events, label)


def _lines(path: Path, shape: Any) -> list[Line]:
    """Return the lines of a file, warning about damaged lines. Raises InputError if a line has an
    unexpected shape or steps decrease."""
    content, before = read_lines(path), 0
    if content.damaged:
        warn(f"{path}: skipped {content.damaged} damaged lines")
    for number, line in zip(content.numbers, content.lines, strict=True):
        figures = {key: value for key, value in line.items() if not key.startswith("sample/")}
        check_shape(figures, shape, f"{path}, line {number}")
        if shape is not EVENTS and line["step"] < before:
            raise InputError(
                f"{path}, line {number}: step must be at least {before}, got {line['step']}"
            )
        before = line["step"]
    return content.lines


def _place(role: str) -> tuple[int, int]:
    """Return the sort key for a role's position in a layer. Unknown roles come last."""
    base = role.removeprefix("shared_").removeprefix("expert_")
    kind = 1 + role.startswith("shared_") + 2 * role.startswith("expert_") if base in BLOCK else 0
    order = (*ATTENTION, *BLOCK)
    return kind, order.index(base) if base in order else len(order)


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return at most `count` evenly spaced items, including the first and the last."""
    picks = {round(i * (len(items) - 1) / (count - 1)) for i in range(count)}
    return [items[i] for i in sorted(picks)] if len(items) > count else list(items)


Kind = Literal["running", "stopped", "failed", "done"]

SILENCE = 300.0
"""Seconds without a heartbeat after which a run on another host is considered dead. The limit is
longer for runs with slow steps."""


@dataclass(frozen=True)
class RunStatus:
    """The status of a run.

    kind    running, stopped (can be resumed), failed or done
    text    the kind and the step
    reason  reason for a stop or failure, else ""
    """

    kind: Kind
    text: str
    reason: str = ""


def run_status(run: RunData) -> RunStatus:
    """Determine the status of a run from its last event, lock and heartbeat.

    A run that ended without logging an event, for example because it was killed, counts as failed.
    If the last event does not end the run, the status is running if the process is `alive`, and
    failed otherwise.
    """
    steps = run.config["train"]["steps"]
    ends = [each for each in run.events if each["kind"] in _EVENTS]
    step = max([run.step, *(each["step"] for each in ends)])
    position = f"step {step:,} of {steps:,}"
    if (run.folder / DONE).exists():
        return RunStatus("done", f"done, {step:,} steps")
    last: Line = ends[-1] if ends else {"kind": "started", "text": ""}
    if last["kind"] in ("stopped", "done"):  # "done" without DONE: stopped at train.exit_step
        return RunStatus("stopped", f"stopped, {position}", last["text"])
    if last["kind"] == "failed":
        return RunStatus("failed", f"failed, {position}", last["text"])
    if alive(run):
        return RunStatus("running", f"running, {position}")
    return RunStatus("failed", f"failed, {position}", "The run was killed, or its node failed.")


_EVENTS = ("started", "continued", "stopped", "failed", "done")


def alive(run: RunData) -> bool:
    """Return whether a run's process is alive.

    On the run's own host, the process is looked up by id and start time, because the id may have
    been reused. On any other host, the last heartbeat must be recent, allowing for clock skew.
    """
    lock = _content(run.folder / LOCK)
    complete = isinstance(lock.get("pid"), int) and isinstance(lock.get("began"), str)
    if lock.get("host") == socket.gethostname() and complete:
        return began(lock["pid"]) == lock["began"]
    beat = _content(run.folder / HEARTBEAT).get("time")
    pace = [value for _, value in run.series("perf/step_time_s")]
    limit = max(SILENCE, 3 * max(pace, default=0))
    return isinstance(beat, int | float) and -SILENCE < time.time() - beat < limit


def _content(path: Path) -> Line:
    """Return the object in a JSON file, or {} if it cannot be read."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
