"""Figures of monitored blocks: the residual stream and attention logits."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from scripts.plots.run_data import RunData, Series, spread
from scripts.plots.style import COLORS, count_tokens, literal, new_figure, plain_log

STEPS = 8
"""Monitored steps drawn as lines over the layers."""
DEPTHS = 6
"""Layers drawn as lines over training."""
EMBEDDING = "embedding"


def residual(run: RunData) -> Figure | None:
    """Root mean square of the entries of the residual stream after each layer. Over the layers,
    later monitored steps are brighter; over training, deeper layers are brighter."""
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
    time.legend(reverse=True, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    for axis in (depth, time):
        plain_log(axis)
    return figure


def attention_logits(runs: Sequence[RunData]) -> Figure | None:
    """The largest scaled and unmasked score: a thick line for all layers, a thin line for each
    layer."""
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
    """Return a monitored figure of a block by tokens."""
    seen = [(run.tokens(line), line["blocks"].get(place, {}).get(figure)) for line in run.monitors]
    return [(x, y) for x, y in seen if y is not None]


def _places(run: RunData, figure: str) -> list[str]:
    """Return the blocks that have a figure: the embedding, then the layers by depth."""
    names = {
        place for line in run.monitors for place, seen in line["blocks"].items() if figure in seen
    }
    return sorted(names, key=lambda place: -1 if place == EMBEDDING else int(place))
