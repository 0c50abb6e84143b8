"""Plot monitored matrices and blocks: spectra, heat maps by layer and role, the residual stream and
attention logits."""

from collections.abc import Callable, Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from scripts.plots.run_data import Line, RunData, Series, spread
from scripts.plots.style import COLORS, count_tokens, literal, new_figure, new_grid, plain_log

Draw = Callable[[Axes, RunData, str, str], None]
"""Function that draws a run on an axis, for a given role and in a given colour."""

DECILES = np.linspace(0, 1, 11)
WEIGHT = ("effective_quantiles", "quantiles")
"""Keys of a weight's spectrum, in order of preference: the spectrum of PC(W), then the spectrum of
W."""


def histograms(runs: Sequence[RunData]) -> Figure | None:
    """Singular values at the last monitored step, divided by the largest singular value. For PC
    layers, the figure shows PC(W).

    Monitors only store the deciles of a spectrum, so values are assumed to be uniformly distributed
    between deciles.
    """
    return _per_role(runs, _histogram, "share of values", "singular value / largest")


def quantiles(runs: Sequence[RunData]) -> Figure | None:
    """Singular values by rank at the last monitored step, averaged over the units of each role.
    Dotted lines show the first monitored step."""
    return _per_role(runs, _quantile_curve, "singular value", "share of values below")


def evolution(run: RunData) -> Figure | None:
    """Median, middle 80% and full range of the singular values, averaged over each role's matrices.
    If only one step was monitored, the figure shows bars and a point."""
    return _evolution(run, WEIGHT)


def momentum(run: RunData) -> Figure | None:
    """Singular values of the momentum after each step: median, middle 80% and full range."""
    return _evolution(run, ("momentum_quantiles",))


def update(run: RunData) -> Figure | None:
    """Singular values of each step's weight change, excluding weight decay: median, middle 80% and
    full range."""
    return _evolution(run, ("update_quantiles",))


def _evolution(run: RunData, names: Sequence[str]) -> Figure | None:
    if not run.monitors:
        return None
    last = run.monitors[-1]
    roles = [role for role in run.roles() if deciles(run, last, role, names) is not None]
    if not roles:
        return None
    figure, axes = new_grid(len(roles))
    for i, (axis, role) in enumerate(zip(axes, roles, strict=True)):
        monitored = [(run.tokens(line), deciles(run, line, role, names)) for line in run.monitors]
        points = [(x, d) for x, d in monitored if d is not None]
        tokens = [x for x, _ in points]
        values = np.stack([d for _, d in points])
        color = COLORS[i % len(COLORS)]
        for low, high, alpha in ((0, 10, 0.15), (1, 9, 0.3)):
            ends = values[:, low], values[:, high]
            if len(tokens) > 1:
                axis.fill_between(tokens, *ends, color=color, alpha=alpha, linewidth=0)
            else:
                axis.vlines(tokens, *ends, color=color, alpha=alpha, linewidth=16)
        axis.plot(tokens, values[:, 5], color=color)
        axis.set(title=role, ylim=(0, None))
        count_tokens(axis)
    figure.supylabel("singular values", fontsize=10)
    return figure


def stable_rank(run: RunData) -> Figure | None:
    """Squared Frobenius norm divided by squared spectral norm, by layer and role."""
    return unit_map(run, "stable_rank", "stable rank")


def nuclear_rank(run: RunData) -> Figure | None:
    """Squared nuclear norm divided by squared Frobenius norm, by layer and role."""
    return unit_map(run, "gradient_nuclear_rank", "nuclear rank of the gradient")


def criterion_map(run: RunData) -> Figure | None:
    """Nuclear rank of the gradient divided by stable rank of the input activations. A ratio above 1
    (red) favours spectral over Euclidean updates."""
    return unit_map(run, "criterion_ratio", "nr(G) / st(A)", is_ratio=True)


def unit_map(run: RunData, figure: str, label: str, *, is_ratio: bool = False) -> Figure | None:
    """Draw a heat map of a metric by layer and role at the metric's last monitored step. Values are
    averaged over units. The colour scale of a ratio is centred on 1."""
    seen = [line for line in run.monitors if any(figure in unit for unit in run.units(line))]
    if not seen:
        return None
    roles = [r for r in run.roles() if any(figure in u for u in run.units(seen[-1], r))]
    units = pd.DataFrame(run.units(seen[-1])).astype({figure: float})
    layers = sorted(units["layer"].dropna().astype(int).unique())
    table = units.pivot_table(figure, "layer", "role").reindex(layers, columns=roles)
    height = min(9.0, 1.5 + 0.32 * len(layers))
    drawn, (axis,) = new_figure(width=1.8 + 0.62 * len(roles), height=height)
    _heat(axis, drawn, table.to_numpy(), label, is_ratio)
    axis.set_xticks(range(len(roles)), roles, rotation=45, ha="right")
    shown = range(0, len(layers), max(1, len(layers) // 12))
    axis.set_yticks(list(shown), [str(layers[i]) for i in shown])
    axis.set(ylabel="layer", title=f"step {seen[-1]['step']}")
    axis.grid(False)
    return drawn


def _heat(axis: Axes, figure: Figure, table: np.ndarray, label: str, is_ratio: bool) -> None:
    """Draw a heat map, showing values in the cells if they fit."""
    norm: Normalize | None = None
    shown = table
    positive = table[np.isfinite(table) & (table > 0)]
    colors = "viridis"
    if is_ratio and positive.size:
        table = np.log2(np.where(table > 0, table, np.nan))
        reach = max(np.log2(1.05), np.abs(np.log2(positive)).max())
        norm, colors = Normalize(-reach, reach), "RdBu_r"
        label = f"log2({label})"
    elif positive.size and positive.max() > 30 * positive.min():
        norm = LogNorm(positive.min(), positive.max())
    image = axis.imshow(table, aspect="auto", cmap=colors, norm=norm, origin="lower")
    figure.colorbar(image, ax=axis, label=label)
    if table.size <= 120:
        for (i, j), value in np.ndenumerate(shown):
            if np.isfinite(table[i, j]):
                shade = image.to_rgba(table[i : i + 1, j])[0]
                dark = shade[:3] @ np.array([0.3, 0.6, 0.1]) < 0.5
                axis.text(
                    j, i, f"{value:.2g}", ha="center", va="center", fontsize=7,
                    color="white" if dark else "black",
                )  # fmt: skip


def deciles(
    run: RunData, line: Line, role: str, names: Sequence[str] = WEIGHT
) -> np.ndarray | None:
    """Return the deciles `[11]` of the singular values, averaged over a role's units.

    `names` lists keys in order of preference. Returns None if no unit has any of these keys.
    """
    rows = [[unit[name] for name in names if name in unit] for unit in run.units(line, role)]
    present = [row[0] for row in rows if row]
    return np.mean(present, axis=0) if present else None


def _per_role(runs: Sequence[RunData], draw: Draw, ylabel: str, xlabel: str) -> Figure | None:
    """Return a figure with a panel per role, in which `draw` draws each run."""
    runs = [run for run in runs if run.monitors]
    roles = list(dict.fromkeys(role for run in runs for role in run.roles()))
    if not roles:
        return None
    figure, axes = new_grid(len(roles))
    for axis, role in zip(axes, roles, strict=True):
        for i, run in enumerate(runs):
            draw(axis, run, role, COLORS[i % len(COLORS)])
        axis.set(title=role)
    figure.supxlabel(xlabel, fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    if len(runs) > 1:
        axes[0].legend(fontsize=7)
    return figure


def _histogram(axis: Axes, run: RunData, role: str, color: str) -> None:
    values = deciles(run, run.monitors[-1], role)
    if values is None or values[-1] <= 0:
        return
    edges = np.linspace(0, 1, 31)
    below = np.interp(edges, values / values[-1], DECILES, left=0.0, right=1.0)
    axis.stairs(np.diff(below), edges, color=color, fill=True, alpha=0.4, label=literal(run.name))
    axis.stairs(np.diff(below), edges, color=color)


def _quantile_curve(axis: Axes, run: RunData, role: str, color: str) -> None:
    first, last = (deciles(run, run.monitors[i], role) for i in (0, -1))
    if last is not None:
        axis.plot(DECILES, last, color=color, label=literal(run.name))
    if first is not None:
        axis.plot(DECILES, first, color=color, linestyle=":", linewidth=1)


STEPS = 8
"""Maximum number of monitored steps to draw as lines over layers."""
DEPTHS = 6
"""Maximum number of layers to draw as lines over training."""
EMBEDDING = "embedding"


def residual(run: RunData) -> Figure | None:
    """Root mean square of the residual stream after each layer. Brighter lines show later steps
    (left) or deeper layers (right)."""
    places = _places(run, "residual_rms")
    if len(places) < 2:
        return None
    figure, (depth, time) = new_figure(2, width=5.0, height=3.6)
    colors = mpl.colormaps["viridis"]
    lines = [line for line in run.monitors if "residual_rms" in line["blocks"].get(places[-1], {})]
    reach = Normalize(0, run.tokens(lines[-1]))
    xs = [-1 if place == EMBEDDING else int(place) for place in places]
    for line in spread(lines, STEPS):
        values = [line["blocks"].get(place, {}).get("residual_rms", np.nan) for place in places]
        depth.plot(xs, values, color=colors(0.92 * reach(run.tokens(line))), marker=".")
    depth.set(xlabel="after layer", ylabel="residual stream, RMS", title="over the layers")
    depth.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    depth.xaxis.set_major_formatter(lambda value, _: "emb." if value == -1 else f"{value:g}")
    shown = mpl.colors.ListedColormap(colors(np.linspace(0, 0.92, 256)))
    figure.colorbar(
        ScalarMappable(reach, shown), ax=depth, label="tokens", format=EngFormatter(sep="")
    )
    for place in spread(places, DEPTHS):
        series = block_series(run, place, "residual_rms")
        name = EMBEDDING if place == EMBEDDING else f"layer {place}"
        share = places.index(place) / (len(places) - 1)
        time.plot(*zip(*series, strict=True), color=colors(0.92 * share), marker=".", label=name)
    time.set_title("over training")
    count_tokens(time)
    names = time.get_legend_handles_labels()
    time.legend(*names, reverse=True, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    for axis in (depth, time):
        plain_log(axis)
    return figure


def attention_logits(runs: Sequence[RunData]) -> Figure | None:
    """Largest unmasked attention logit after scaling. The thick line is the maximum over all
    layers, and thin lines show individual layers."""
    runs = [run for run in runs if _places(run, "max_attention_logit")]
    if not runs:
        return None
    figure, (axis,) = new_figure(width=5.6, height=3.2)
    for i, run in enumerate(runs):
        color = COLORS[i % len(COLORS)]
        largest: dict[float, float] = {}
        for place in _places(run, "max_attention_logit"):
            series = block_series(run, place, "max_attention_logit")
            axis.plot(*zip(*series, strict=True), color=color, linewidth=0.7, alpha=0.5)
            for x, y in series:
                largest[x] = max(y, largest.get(x, y))
        axis.plot(
            *zip(*largest.items(), strict=True), color=color, linewidth=2.2, label=literal(run.name)
        )
    axis.set(ylabel="largest attention logit")
    axis.set_title("thick: all layers, thin: each layer", fontsize=9)
    count_tokens(axis)
    if len(runs) > 1:
        axis.legend()
    return figure


def block_series(run: RunData, place: str, figure: str) -> Series:
    """Return the points (tokens, value) of a metric monitored for a block."""
    seen = [(run.tokens(line), line["blocks"].get(place, {}).get(figure)) for line in run.monitors]
    return [(x, y) for x, y in seen if y is not None]


def _places(run: RunData, figure: str) -> list[str]:
    """Return the blocks for which a metric is monitored: the embedding, then layers by depth."""
    names = {
        place for line in run.monitors for place, seen in line["blocks"].items() if figure in seen
    }
    return sorted(names, key=lambda place: -1 if place == EMBEDDING else int(place))
