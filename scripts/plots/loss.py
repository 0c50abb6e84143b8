"""Loss curves of runs, overlaid."""

import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from scripts.plots.style import new_figure
from training.errors import InputError


def plot_loss(folders: Sequence[Path]) -> Figure:
    """Training loss, and validation loss as the mean over sets, against tokens; a colour per run.

    Raises InputError for a folder without metrics.jsonl or without a logged loss.
    """
    figure, (axes,) = new_figure(width=7, height=4)
    for folder in folders:
        lines = metrics(folder)
        train = [(m["progress/tokens"], m["train/loss"]) for m in lines if "train/loss" in m]
        if not train:
            raise InputError(f"{folder} has logged no loss yet")
        per_step = train[-1][0] / max(m["step"] for m in lines if "train/loss" in m)
        (line,) = axes.plot(*zip(*train, strict=True), label=folder.name, linewidth=1.2)
        validation = [(per_step * m["step"], mean) for m in lines if (mean := validation_mean(m))]
        if validation:
            axes.plot(*zip(*validation, strict=True), "o--", color=line.get_color(), markersize=4)
    axes.set(
        xlabel="tokens", ylabel="loss (nats per token)", title="line: training, dots: validation"
    )
    axes.legend()
    return figure


def metrics(folder: Path) -> list[dict[str, float]]:
    """The logged lines of a run."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise InputError(f"runs must be folders with a metrics.jsonl, got {folder}")
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def validation_mean(line: dict[str, float]) -> float | None:
    """The mean validation loss over sets of a logged line, None if it has none."""
    losses = [v for k, v in line.items() if k.startswith("val/") and k.endswith("/loss")]
    return sum(losses) / len(losses) if losses else None
