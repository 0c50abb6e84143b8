"""Plot a study: loss differences between variants, and losses by setting or over training."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from scripts.plots.style import COLORS, literal, new_figure
from scripts.studies.records import RecordBook
from scripts.studies.tables import (
    comparison,
    loss_by,
    read_results,
    searched_keys,
    trained,
)
from training.errors import InputError


def plot_study(path: Path) -> Figure:
    """Draw each variant's loss relative to its baseline: every seed, mean and standard error. The
    title lists variants that are not drawn because a run failed, and variants without a valid
    verdict."""
    content = read_results(path)
    losses = {row["variant"]: row["losses"] for row in content.get("rows", ())}
    frame = comparison(content)
    if "difference" not in frame:
        raise InputError(f"{path} contains no finished comparison of two variants yet")
    # A variant with a failed run has no difference.
    compared = frame[frame["difference"].notna()].iloc[::-1]
    figure, (axes,) = new_figure(width=7.5, height=1.2 + 0.34 * len(compared))
    bases = list(dict.fromkeys(frame["against"].dropna()))
    for i, row in enumerate(compared.itertuples()):
        color = COLORS[bases.index(row.against) % len(COLORS)]
        seeds = [a - b for a, b in zip(losses[row.variant], losses[row.against], strict=True)]
        axes.plot(seeds, [i] * len(seeds), "o", color=color, alpha=0.35, markersize=4)
        axes.errorbar(row.difference, i, xerr=row.difference_error, fmt="D", color=color, capsize=3)
    axes.axvline(0, color="0.3", linewidth=0.8)
    labels = [literal(f"{row.variant}  -  {row.against}") for row in compared.itertuples()]
    axes.set_yticks(range(len(compared)), labels)
    axes.set_ylim(-0.6, len(compared) - 0.4)
    axes.set(xlabel="difference in validation loss (nats per token): left is better")
    # Centre the title on the figure rather than on the axes, because variant names take up half the
    # width.
    said = {
        "a run failed": "not drawn, because a run failed",
        "refused:": "refused",
        "not comparable:": "not comparable",
    }
    lines = [
        textwrap.fill(f"{text}: {', '.join(rows['variant'])}", 90)
        for start, text in said.items()
        if len(rows := frame[frame["verdict"].str.startswith(start, na=False)])
    ]
    about = f"mean and standard error of {trained(content)}"
    figure.suptitle(literal("\n".join([content["title"], about, *lines])))
    return figure


def plot_losses(path: Path, key: str) -> Figure:
    """Plot the losses of all variants against the tuned values of `key`. The title lists the values
    at which runs failed."""
    content = read_results(path)
    keys = searched_keys(content)
    if key not in keys:
        raise InputError(f"--by must be a tuned config key ({', '.join(keys)}), got {key}")
    frame = loss_by(content, key)
    if frame.empty:
        raise InputError(f"{path} contains no losses by {key} yet")
    frame = frame.set_index("variant")
    figure, (axes,) = new_figure(width=7.5, height=4.5)
    for i, (name, losses) in enumerate(frame.iterrows()):
        points = losses.dropna()
        axes.plot(
            [float(value) for value in points.index],
            points,
            ("o-", "s--", "^:")[i // len(COLORS) % 3],
            color=COLORS[i % len(COLORS)],
            markersize=4,
            label=literal(name),
        )
    axes.set(xscale="log", xlabel=key, ylabel="validation loss (nats per token)")
    axes.legend(fontsize=7, ncols=2)
    failed = [
        f"{name} at {value}"
        for name, losses in frame.iterrows()
        for value, loss in losses.items()
        if loss == math.inf
    ]
    text = textwrap.fill(f"not drawn, because runs failed: {', '.join(failed)}", 90)
    lines = [text] if failed else []
    figure.suptitle(literal("\n".join([content["title"], *lines])))
    return figure


def plot_curves(path: Path, variants: Sequence[str]) -> Figure:
    """Draw the validation loss of variants over training: mean and standard error over seeds. A
    curve ends where the loss of a seed is missing or not finite.

    The curves are read from runs.jsonl in the same folder as the results.
    """
    content, records = read_results(path), RecordBook(path.parent)
    runs = {row["variant"]: row["runs"] for row in content.get("rows", ())}
    unknown = [name for name in variants if name not in runs]
    if unknown:
        raise InputError(f"--curves must be among {', '.join(runs)}, got {', '.join(unknown)}")
    figure, (axes,) = new_figure(width=6.0, height=4.5)
    for i, name in enumerate(variants):
        courses = [
            pd.Series(dict(records[run].figures["course"]), dtype=float) for run in runs[name]
        ]
        losses = pd.concat(courses, axis="columns")
        if len(losses) == 1:
            raise InputError(
                f"{path}: the runs of {name} were only validated at the end; to plot curves, set "
                "validation.interval=N in the study's overrides"
            )
        axes.errorbar(
            losses.index,
            losses.mean(axis="columns", skipna=False),
            yerr=losses.sem(axis="columns"),
            color=COLORS[i % len(COLORS)],
            capsize=3,
            label=literal(name),
        )
    axes.set(xlabel="step", ylabel="validation loss (nats per token)")
    axes.legend()
    figure.suptitle(f"{literal(content['title'])}\nmean and standard error of {trained(content)}")
    return figure
