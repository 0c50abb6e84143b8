"""The differences between the variants of a study, with error bars."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from scripts.plots.style import COLORS, new_figure
from training.errors import InputError
from training.json_file import read_json


def plot_study(path: Path) -> Figure:
    """Each variant's difference from its baseline: every seed, the mean and its standard error.

    `path` is the results.json of scripts/study.py.
    """
    try:
        content: dict[str, Any] = read_json(path)
        rows = content["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"study must be a results.json of scripts/study.py, got {path}") from error
    losses = {row["variant"]: row["losses"] for row in rows}
    # A variant with a run that failed has no difference.
    compared = [row for row in rows if row.get("difference") is not None][::-1]
    figure, (axes,) = new_figure(width=7.5, height=1.2 + 0.34 * len(compared))
    bases = list(dict.fromkeys(row["against"] for row in rows if row["against"] is not None))
    for i, row in enumerate(compared):
        color = COLORS[bases.index(row["against"]) % len(COLORS)]
        seeds = [a - b for a, b in zip(row["losses"], losses[row["against"]], strict=True)]
        axes.plot(seeds, [i] * len(seeds), "o", color=color, alpha=0.35, markersize=4)
        axes.errorbar(
            row["difference"], i, xerr=row["difference_error"], fmt="D", color=color, capsize=3
        )
    axes.axvline(0, color="0.3", linewidth=0.8)
    labels = [f"{row['variant']}  -  {row['against']}" for row in compared]
    axes.set_yticks(range(len(compared)), labels)
    axes.set(xlabel="difference in validation loss (nats per token): left is better")
    # Over the whole figure: the names of variants take half of its width.
    figure.suptitle(f"{content['title']}\nmean and standard error of {len(content['seeds'])} seeds")
    return figure
