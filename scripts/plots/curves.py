"""Curves over training: loss, learning rates, condition numbers, expert balance and others."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from scripts.plots.run_data import RunData, Series
from scripts.plots.style import COLORS, count_tokens, literal, new_figure, new_grid, plain_log

STYLES = ("-", "--", ":", "-.")
"""Line styles that tell runs apart in figures where colours denote something else."""

SIGNALS = {"snr": "SNR", "top_share": "TopShare", "alignment": "alignment"}
"""Monitored signal-to-noise metrics, and their names in titles."""

RULE = "monitor/rule_"
"""Prefix of metrics reported by update rules."""

TIMES = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def loss(runs: Sequence[RunData]) -> Figure | None:
    """Loss in nats per token. Lines show training batches, and dots the mean over the validation
    sets. If training and validation sets have the same names, the mean uses the weights of the
    training mixture. Lines have gaps where the loss was not finite."""
    runs = [run for run in runs if run.series("train/loss")]
    if not runs:
        return None
    figure, axes = new_figure(2, width=5.2, height=3.6)
    longest = max(run.seconds()(run.metrics[-1]) for run in runs)
    unit, size = next((name, size) for name, size in TIMES if longest >= 2 * size or size == 1)
    for i, run in enumerate(runs):
        for axis, x in zip(axes, (run.tokens, run.seconds(size)), strict=True):
            _line(
                axis, run.curve("train/loss", x), **look(i), label=literal(run.name), linewidth=1.2
            )
            _line(axis, run.curve("val/loss", x), **look(i) | {"linestyle": "--"}, marker="o")
    axes[0].set(ylabel="loss (nats per token)")
    count_tokens(axes[0])
    axes[0].set_title("line: training, dots: validation", fontsize=9)
    axes[1].set(xlabel=f"training time ({unit})", ylabel="loss (nats per token)")
    axes[0].legend()
    return figure


def learning_rates(runs: Sequence[RunData]) -> Figure | None:
    """Learning rate of each parameter group. Colours denote groups, and line styles denote runs."""
    runs = [run for run in runs if run.names("lr/")]
    if not runs:
        return None
    figure, (axis,) = new_figure(width=4.9, height=3.2)
    groups = list(dict.fromkeys(name for run in runs for name in run.names("lr/")))
    for j, run in enumerate(runs):
        for i, group in enumerate(groups):
            # With a single run, use line styles to distinguish groups whose lines coincide.
            style = STYLES[(j if len(runs) > 1 else i) % len(STYLES)]
            short = group.removeprefix("lr/")
            label = f"{literal(run.name)}, {short}" if len(runs) > 1 else short
            _line(axis, run.series(group), **look(i) | {"linestyle": style}, label=label)
    axis.set(ylabel="learning rate")
    count_tokens(axis)
    axis.legend(fontsize=8)
    return figure


def gradient_norm(runs: Sequence[RunData]) -> Figure | None:
    """Global gradient norm before clipping."""
    return _one(runs, "optim/grad_norm", "gradient norm, before clipping")


def condition_numbers(runs: Sequence[RunData]) -> Figure | None:
    """Largest singular value divided by the mean of the smallest 10% of singular values. Lower
    values mean better conditioning. The lines show the mean for each role and the geometric mean
    over all matrices."""

    def draw(axis: Axes, run: RunData) -> None:
        for i, role in enumerate(run.roles()):
            plain = run.series(f"monitor/condition_number/{role}")
            effective = run.series(f"monitor/effective_condition_number/{role}")
            label = f"{role}, PC(W)" if effective else role
            _line(axis, effective or plain, **look(i), label=label)
        geometric = run.series("monitor/condition_number/geometric_mean")
        _line(axis, geometric, color="black", linewidth=2.5, label="all, geometric mean")
        plain_log(axis)

    return _per_run(runs, "monitor/condition_number/", "modified condition number", draw)


def tracked_norms(runs: Sequence[RunData]) -> Figure | None:
    """Relative error of the tracked spectral norm in PC layers. Solid lines show the median over a
    role's matrices, and dashed lines the maximum."""
    name = "pc_norm_error"

    def draw(axis: Axes, run: RunData) -> None:
        roles = [role for role in run.roles() if run.names(f"monitor/{name}/{role}")]
        for i, role in enumerate(roles):
            groups = [
                (run.tokens(line), errors)
                for line in run.monitors
                if (errors := [u[name] for u in run.units(line, role) if u.get(name) is not None])
            ]
            _line(axis, [(x, median(e)) for x, e in groups], **look(i), label=role)
            _line(axis, [(x, max(e)) for x, e in groups], **look(i) | {"linestyle": "--"})
        axis.set(yscale="log")

    return _per_run(runs, f"monitor/{name}/", "relative error of the tracked norm", draw)


def signal(run: RunData) -> Figure | None:
    """Signal and noise in the gradients of a step's micro-batches and in the updates of the last
    steps. SNR is the debiased squared norm of the mean divided by the trace of the covariance.
    TopShare is the largest eigenvalue of the covariance divided by the trace, and the dotted line
    is the smallest possible TopShare. Alignment is the cosine similarity with the previous step."""
    panels = [
        (f"{what}_{figure}", f"{name} of {what}s")
        for figure, name in SIGNALS.items()
        for what in ("gradient", "update")
        if run.names(f"monitor/{what}_{figure}/")
    ]
    roles = run.roles()
    if not panels or not roles:
        return None
    figure, axes = new_grid(len(panels), columns=2, width=4.2, height=2.6)
    for axis, (name, title) in zip(axes, panels, strict=True):
        for i, role in enumerate(roles):
            series = run.series(f"monitor/{name}/{role}")
            _line(axis, series, **look(i), label=role, linewidth=1.2, marker=".")
        if name.endswith("top_share"):
            axis.axhline(1 / (run.samples(name) - 1), color="black", linestyle=":", linewidth=1)
            axis.set_ylim(0, 1.03)
        elif name.endswith("snr"):
            axis.set_yscale("symlog", linthresh=0.1)
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=10)
        count_tokens(axis)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def rule_reports(run: RunData) -> Figure | None:
    """Metrics reported by the update rules, averaged over each role's matrices. Metrics that are
    always 0 are omitted."""
    reports = {name: run.series(name) for name in run.names(RULE)}
    reports = {name: series for name, series in reports.items() if any(y for _, y in series)}
    titles = list(dict.fromkeys(name.split("/")[1] for name in reports))
    if not titles:
        return None
    figure, axes = new_grid(len(titles), columns=2, width=4.2, height=2.6)
    for axis, title in zip(axes, titles, strict=True):
        roles = (name for name in reports if name.split("/")[1] == title)
        for i, name in enumerate(roles):
            role = name.split("/")[2]
            _line(axis, reports[name], **look(i), label=role, linewidth=1.2, marker=".")
        axis.set_title(literal(title), fontsize=10)
        axis.legend(fontsize=7)
        count_tokens(axis)
    return figure


def balance(runs: Sequence[RunData]) -> Figure | None:
    """MaxVio of the worst layer. A layer's MaxVio is (largest load - mean load) / mean load over
    its experts; 0 means perfect balance."""
    return _one(runs, "moe/max_vio", "MaxVio in the worst layer")


def tasks(runs: Sequence[RunData]) -> Figure | None:
    """Accuracy on multiple-choice tasks. Answers are chosen by log-likelihood (solid lines) or by
    log-likelihood per character (dashed lines)."""

    def draw(axis: Axes, run: RunData) -> None:
        names = [
            name for name in run.names("task/") if name.endswith("/acc") and name.count("/") > 1
        ]
        for i, name in enumerate(names):
            label = literal(name.split("/")[1])
            _line(axis, run.series(name), **look(i), label=label, marker=".")
            _line(axis, run.series(f"{name}_norm"), **look(i) | {"linestyle": "--"}, marker=".")

    return _per_run(runs, "task/", "accuracy", draw)


def z_loss(runs: Sequence[RunData]) -> Figure | None:
    """Mean squared log-sum-exp of the logits, excluding the z-loss coefficient."""
    return _one(runs, "train/z_loss", "squared log-sum-exp of the logits", log=True)


def penalty(runs: Sequence[RunData]) -> Figure | None:
    """Off-diagonal Gram penalty divided by the loss."""
    return _one(runs, "penalty/loss_ratio", "Gram penalty / loss", log=True)


def _one(runs: Sequence[RunData], metric: str, label: str, *, log: bool = False) -> Figure | None:
    """Draw a metric over tokens with one colour per run. Return None if no run logged it."""
    runs = [run for run in runs if run.series(metric)]
    if not runs:
        return None
    figure, (axis,) = new_figure(width=4.9, height=3.2)
    for i, run in enumerate(runs):
        _line(axis, run.curve(metric), **look(i), label=literal(run.name))
    axis.set(ylabel=label, yscale="log" if log else "linear")
    count_tokens(axis)
    if len(runs) > 1:
        axis.legend()
    return figure


def _per_run(
    runs: Sequence[RunData], prefix: str, label: str, draw: Callable[[Axes, RunData], None]
) -> Figure | None:
    """Return a figure with a panel, drawn by `draw`, for each run that logged metrics starting with
    `prefix`."""
    runs = [run for run in runs if run.names(prefix)]
    if not runs:
        return None
    figure, axes = new_figure(len(runs), width=5.6, height=3.6)
    for axis, run in zip(axes, runs, strict=True):
        draw(axis, run)
        axis.set(title=literal(run.name))
        count_tokens(axis)
        # Called without arguments, legend warns if all values of a run are missing.
        names = axis.get_legend_handles_labels()
        axis.legend(*names, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    axes[0].set_ylabel(label)
    return figure


def look(i: int) -> dict[str, Any]:
    """Return the colour and line style of the i-th line. The style changes when colours repeat."""
    cycle, color = divmod(i, len(COLORS))
    return {"color": COLORS[color], "linestyle": STYLES[cycle % len(STYLES)]}


def _line(axis: Axes, series: Series, **style: object) -> None:
    """Draw a series unless it is empty."""
    if series:
        plot: Callable[..., object] = axis.plot
        plot(*zip(*series, strict=True), **({"markersize": 4} | style))
