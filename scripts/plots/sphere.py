"""A spectral step in two pictures: its singular values, and what the sphere's tangent changes."""

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.plots.style import COLORS, new_figure
from spectral.polar import msign

ROWS, FEATURES, SAMPLES, NOISE = 128, 256, 1024, 0.1
ANGLE, LENGTH = 0.9, 0.55


def plot_sphere() -> Figure:
    """Singular values of a gradient and of two updates made from it; a weight on its sphere and
    the steps of Muon and SSO from there."""
    figure, (values, sphere) = new_figure(2)
    plot_singular_values(values)
    plot_steps(sphere)
    return figure


def plot_singular_values(axes: Axes) -> None:
    """Draw the singular values of a layer's gradient `[128, 256]` over the largest, after the sign
    of each entry (AdamW's first step) and after msign (Muon's)."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(FEATURES, 64, generator=generator)
    inputs = (inputs @ torch.randn(64, SAMPLES, generator=generator)).relu()
    errors = torch.randn(ROWS, 16, generator=generator)
    errors = errors @ torch.randn(16, SAMPLES, generator=generator)
    errors += NOISE * torch.randn(ROWS, SAMPLES, generator=generator)
    gradient = errors @ inputs.mT / SAMPLES
    updates = {
        "gradient": gradient,
        "AdamW's step: sign of each entry": gradient.sign(),
        "spectral step: msign": msign(gradient),
    }
    for label, update in updates.items():
        singular = torch.linalg.svdvals(update.double())
        axes.plot(singular / singular[0], label=label)
    axes.set(
        yscale="log", ylim=(1e-4, 3), xlabel="index", ylabel="singular value / largest",
        title="What a step keeps",
    )  # fmt: skip
    axes.legend(loc="lower left")


def plot_steps(axes: Axes) -> None:
    """Draw the sphere of radius R in a plane through the weight, a step of Muon, and SSO's, which
    is tangent to the sphere and brought back to it before the next."""
    turn = np.linspace(0, 2 * np.pi, 200)
    axes.plot(np.cos(turn), np.sin(turn), color="0.5")
    weight = np.array([np.cos(ANGLE), np.sin(ANGLE)])
    tangent = np.array([-weight[1], weight[0]])
    moved = LENGTH * (0.6 * weight + 0.8 * tangent)
    labels = ("Muon: msign(M)", r"SSO: msign(M + $\lambda$ u v$^T$)")
    for step, label, color in zip((moved, LENGTH * tangent), labels, COLORS, strict=False):
        x, y = weight + step
        arrow = {"arrowstyle": "->", "color": color}
        axes.annotate("", (x, y), (weight[0], weight[1]), arrowprops=arrow)
        axes.text(x - 0.03, y + 0.05, label, color=color, ha="right")
    axes.plot(weight[0], weight[1], "o", color="black")
    axes.text(weight[0] + 0.06, weight[1] + 0.04, "W")
    axes.text(0, 0, "weights of spectral norm R", ha="center", color="0.4")
    axes.set(xlim=(-1.9, 1.4), ylim=(-1.1, 1.6), title="Where a step leads")
    axes.set_aspect("equal")
    axes.set_axis_off()
