"""The polynomials of PC layers as maps of singular values."""

import torch
from matplotlib.figure import Figure

from scripts.plots.style import new_figure
from spectral.effective_weight import DOMAIN
from spectral.odd_polynomial import PRESETS, evaluate

CUTOFFS = {1: 0.8, 2: 0.6, 3: 0.4, 4: 0.3}
BEYOND = 1.2


def plot_maps() -> Figure:
    """Each level on its interval and a little beyond, with the function it approximates; and the
    factor by which it lifts small singular values."""
    figure, (left, right) = new_figure(2)
    x = torch.linspace(0, BEYOND, 600, dtype=torch.float64)
    for level in PRESETS:
        name = f"level {level}" if level else "level 0 (identity)"
        (line,) = left.plot(x, evaluate(x, level), label=name)
        if level:
            target = (x / CUTOFFS[level]).clamp(max=1)
            left.plot(x, target, color=line.get_color(), linewidth=0.8, linestyle=":")
    left.axvspan(DOMAIN, BEYOND, color="0.5", alpha=0.15, linewidth=0)
    left.set(
        xlabel="singular value / largest", ylabel="g", xlim=(0, BEYOND), ylim=(0, 1.3),
        title="Maps (dotted: what they approximate)",
    )  # fmt: skip
    left.legend(loc="lower right")
    small = torch.logspace(-3, 0, 300, dtype=torch.float64)
    for level in PRESETS:
        right.plot(small, evaluate(small, level) / small)
    right.set(
        xscale="log", xlabel="singular value / largest", ylabel="g(x) / x",
        title="Factor on each value",
    )  # fmt: skip
    return figure
