"""Loss curves of runs, overlaid."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from scripts.plots.style import new_figure
from training.errors import InputError
from training.report.metrics import read_metrics


def plot_loss(folders: Sequence[Path]) -> Figure:
    """Training loss, and validation loss as the mean over sets, against tokens; a colour per run.

    Raises InputError for a folder without metrics.jsonl or without a logged loss.
    """
    figure, (axes,) = new_figure(width=7, height=4)
    for folder in folders:
        try:
            lines = read_metrics(folder)
        except OSError:
            raise InputError(f"runs must be folders with a metrics.jsonl, got {folder}") from None
        train = [(m["progress/tokens"], m["train/loss"]) for m in lines if "train/loss" in m]
        if not train:
            raise InputError(f"{folder} has logged no loss yet")
        per_step = train[-1][0] / max(m["step"] for m in lines if "train/loss" in m)
        (line,) = axes.plot(*zip(*train, strict=True), label=folder.name, linewidth=1.2)
        validation = [(per_step * m["step"], m["val/loss"]) for m in lines if "val/loss" in m]
        if validation:
            axes.plot(*zip(*validation, strict=True), "o--", color=line.get_color(), markersize=4)
    axes.set(
        xlabel="tokens", ylabel="loss (nats per token)", title="line: training, dots: validation"
    )
    axes.legend()
    return figure
