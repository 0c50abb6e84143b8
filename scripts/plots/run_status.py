"""The status of a run: running, stopped, failed or done."""

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scripts.plots.run_data import Line, RunData
from training.json_file import read_json
from training.lifecycle.run_folder import DONE, LOCK, began
from training.lifecycle.watchdog import HEARTBEAT

Kind = Literal["running", "stopped", "failed", "done"]

SILENCE = 300.0
"""Smallest number of seconds without a heartbeat after which a run on another host counts as
ended."""


@dataclass(frozen=True)
class RunStatus:
    """The status of a run.

    kind    running, stopped (it can continue), failed or done
    text    the kind in a few words, with the step
    reason  why it stopped or failed, "" if it did not
    """

    kind: Kind
    text: str
    reason: str = ""


def run_status(run: RunData) -> RunStatus:
    """Return the status of a run, from its last event, its lock and its heartbeat.

    A run that ended without an event, such as a killed run, has failed. On this host its process is
    checked; on another host it counts as running until its heartbeat is late.
    """
    steps = run.config["train"]["steps"]
    ends = [each for each in run.events if each["kind"] in _EVENTS]
    step = max([run.step, *(each["step"] for each in ends)])
    place = f"step {step:,} of {steps:,}"
    if (run.folder / DONE).exists():
        return RunStatus("done", f"done, {step:,} steps")
    last: Line = ends[-1] if ends else {"kind": "started", "text": ""}
    if last["kind"] in ("stopped", "done"):  # without the file DONE, by train.exit_step
        return RunStatus("stopped", f"stopped, {place}", last["text"])
    if last["kind"] == "failed":
        return RunStatus("failed", f"failed, {place}", last["text"])
    if alive(run):
        return RunStatus("running", f"running, {place}")
    return RunStatus(
        "failed",
        f"failed, {place}",
        "The run was killed, or its node failed.",
    )


_EVENTS = ("started", "continued", "stopped", "failed", "done")


def alive(run: RunData) -> bool:
    """Return whether a run's process is alive, judged by its lock and heartbeat.

    Another process may now have the same id, and the clocks of hosts may differ by seconds.
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
