"""The figures of the study of optimizers: loss against rate, and loss against tokens."""

import statistics

from matplotlib.figure import Figure

from scripts.plots.style import COLORS, count_tokens, new_figure
from scripts.studies.answer import PC
from scripts.studies.evidence import Evidence, rate_points


def style(name: str, study: Evidence) -> tuple[str, str]:
    """Colour and line style: a colour per rule, dashed with PC layers."""
    rules = [each for each in study.study.variants if not each.endswith(PC)]
    color = COLORS[rules.index(name.removesuffix(PC)) % len(COLORS)]
    return color, "--" if name.endswith(PC) else "-"


def plot_rates(study: Evidence) -> Figure:
    """Loss over the tried rates divided by the best one, so that widths of basins can be seen."""
    figure, (axes,) = new_figure(width=6.5, height=4.0)
    for name in study.study.variants:
        points = rate_points(study.trials, name)
        if points:
            best = min(points, key=lambda point: point[1])
            color, line = style(name, study)
            axes.plot(
                [rate / best[0] for rate, _ in points],
                [loss - best[1] for _, loss in points],
                line,
                marker="o",
                markersize=3,
                color=color,
                label=name,
            )
    axes.set_xscale("log", base=2)
    axes.axhline(0.01, color="0.3", linewidth=0.8, linestyle=":")
    axes.set(xlabel="rate over the best one", ylabel="loss above the best (nats per token)")
    axes.set_ylim(bottom=0, top=min(axes.get_ylim()[1], 0.3))
    axes.legend(fontsize=8, ncols=2)
    return figure


def plot_courses(study: Evidence) -> Figure:
    """Validation loss over tokens at the chosen settings, the mean over the seeds."""
    figure, (axes,) = new_figure(width=6.5, height=4.0)
    for name in study.study.variants:
        records = [record for record in study.runs(name) if not record.failed]
        if not records:
            continue
        courses = [dict(map(tuple, record.figures["course"])) for record in records]
        steps = sorted(set.intersection(*(set(course) for course in courses)))
        batch = records[0].figures["tokens"] / max(steps)
        color, line = style(name, study)
        axes.plot(
            [step * batch for step in steps],
            [statistics.mean(course[step] for course in courses) for step in steps],
            line,
            color=color,
            label=name,
        )
    count_tokens(axes)
    axes.set_ylabel("validation loss (nats per token)")
    axes.legend(fontsize=8, ncols=2)
    return figure
