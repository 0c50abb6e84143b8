"""Loss against learning rate, a curve per width, the optima marked."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.plots.style import COLORS, new_figure
from training.errors import InputError
from training.json_file import read_json


def plot_sweep(path: Path) -> Figure:
    """A panel per optimizer: the loss at each rate, a colour per width, a star at each width's best
    rate. `path` is the results.json of scripts/sweep_width.py."""
    try:
        content: dict[str, Any] = read_json(path)
        points, best = content["points"], content["best"]
        optimizers = list(content["optimizers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"sweep must be a results.json of scripts/sweep_width.py, got {path}"
        ) from error
    figure, axes = new_figure(len(optimizers), width=2.9, height=3.4)
    for axis, name in zip(axes, optimizers, strict=True):
        mine = [point for point in points if point["optimizer"] == name]
        _panel(axis, mine, [each for each in best if each["optimizer"] == name])
        axis.set(xscale="log", xlabel="learning rate", title=name)
        rates = sorted({point["rate"] for point in mine})
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=45)
        axis.minorticks_off()
    axes[0].set_ylabel("validation loss (nats per token)")
    axes[0].legend(title="width")
    figure.suptitle(content["title"])
    return figure


def _panel(axis: Axes, points: list[dict[str, Any]], best: list[dict[str, Any]]) -> None:
    """Draw the curves of one optimizer; a rate at which a run failed leaves a gap."""
    for i, width in enumerate(dict.fromkeys(point["width"] for point in points)):
        mine = sorted((p for p in points if p["width"] == width), key=lambda p: float(p["rate"]))
        losses = [float("nan") if p["loss"] is None else p["loss"] for p in mine]
        color = COLORS[i % len(COLORS)]
        axis.plot([p["rate"] for p in mine], losses, "o-", color=color, markersize=4, label=width)
        for each in (b for b in best if b["width"] == width):
            axis.plot(
                each["rate"], each["loss"], "*", color=color, markersize=15, markeredgecolor="white"
            )
