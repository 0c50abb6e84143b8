"""What is kept of a run that has ended: its losses, its course and its stability."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from scripts.studies.records import read_lines
from training.report.metrics import read_metrics

Line = Mapping[str, Any]

SPIKE: Final = 0.5
"""Nats by which a logged training loss exceeds the median of those before it, in a spike."""
SPIKE_WINDOW: Final = 16
"""Logged losses that make this median."""


def summary(folder: Path) -> dict[str, Any]:
    """The figures of a run folder.

    loss          the last validation loss, nats per token, the mean over its sets
    step_seconds  seconds of a step in the fastest stretch between two logged ones: what else the
                  machine does only makes a step longer
    """
    metrics = read_metrics(folder)
    monitors = folder / "monitors.jsonl"
    monitored = read_lines(monitors) if monitors.is_file() else []
    validations = [line for line in metrics if "val/loss" in line]
    last = validations[-1] if validations else {}
    return {
        "loss": last.get("val/loss"),
        "losses": {
            name.split("/")[1]: value
            for name, value in last.items()
            if name.startswith("val/") and name.endswith("/loss") and name.count("/") == 2
        },
        "step_seconds": min(
            (line["perf/step_time_s"] for line in metrics if line.get("perf/step_time_s")),
            default=None,
        ),
        "tokens": max((line.get("progress/tokens", 0) for line in metrics), default=0),
        "course": [[line["step"], line["val/loss"]] for line in validations],
        **stability(metrics, monitored),
    }


def stability(metrics: Sequence[Line], monitored: Sequence[Line]) -> dict[str, Any]:
    """Spikes of the training loss, steps skipped, and the largest figures that monitors saw."""
    losses = [line["train/loss"] for line in metrics if line.get("train/loss") is not None]
    spikes = sum(
        losses[i] > statistics.median(losses[i - SPIKE_WINDOW : i]) + SPIKE
        for i in range(SPIKE_WINDOW, len(losses))
    )
    skipped = [line.get("optim/skipped_steps", 0) for line in metrics]
    return {
        "spikes": spikes,
        "skipped_steps": max(skipped, default=0),
        "largest_logit": largest(monitored, "max_attention_logit"),
        "residual_rms": largest(monitored[-1:], "residual_rms"),
    }


def largest(monitored: Sequence[Line], figure: str) -> float | None:
    """The largest value of a block's figure in some monitored steps."""
    values = [block.get(figure) for line in monitored for block in line.get("blocks", {}).values()]
    return max((value for value in values if value is not None), default=None)
