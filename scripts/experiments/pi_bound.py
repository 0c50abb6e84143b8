"""The stable rank of ReLU features stays below pi, however wide they are."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from scripts.experiments.check import at_least, at_most, equal, near
from scripts.experiments.experiment import Data, Experiment, Outcome
from scripts.experiments.regression import gaussian
from scripts.plots.style import draw_lines, new_figure, tick
from spectral.measures import stable_rank


@dataclass(frozen=True)
class Sizes:
    """(features, inputs, samples) of each matrix."""

    shapes: tuple[tuple[int, int, int], ...] = (
        (100, 50, 400),
        (256, 128, 512),
        (512, 256, 2048),
        (1024, 512, 2048),
        (2048, 1024, 4096),
    )


BOUND = math.pi  # E relu^2 / (E relu)^2 = (1/2) / (1 / (2 pi))
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu^2": lambda x: x.relu().square(),
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


def moment_ratio(activation: Callable[[Tensor], Tensor]) -> float:
    """E f(x)^2 / (E f(x))^2 for a standard normal x, by the trapezoidal rule."""
    x = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    density = (-x.square() / 2).exp()
    density = density / density.sum()
    y = activation(x)
    return float((density * y.square()).sum() / (density * y).sum().square())


def run(sizes: Sizes, seed: int) -> Outcome:
    """Compare stable ranks of relu(V X) with pi and with the bound from the mean column."""
    generator = torch.Generator().manual_seed(seed)
    ranks, bounds, by_svd = [], [], []
    for features, inputs, samples in sizes.shapes:
        x = gaussian(generator, inputs, samples)
        a = (gaussian(generator, features, inputs) @ x).relu()
        ranks.append(float(stable_rank(a)))
        values = torch.linalg.svdvals(a)
        by_svd.append(float((values / values[0]).square().sum()))
        mean = a.mean(1)
        bounds.append(float(a.square().sum(0).mean() / mean.square().sum()))
    checks = [
        at_most("largest st(A), against pi", max(ranks), BOUND, "paper"),
        at_most("largest st(A) / bound from the mean column",
                max(r / b for r, b in zip(ranks, bounds, strict=True)), 1, "paper, 2.1"),
        at_least("st of the widest - st of the narrowest", ranks[-1] - ranks[0], 0, "paper"),
    ]  # fmt: skip
    checks += [
        equal(f"st(A), {shape[0]} features, against an SVD", rank, exact)
        for shape, rank, exact in zip(sizes.shapes, ranks, by_svd, strict=True)
    ]
    ratios = {name: moment_ratio(activation) for name, activation in ACTIVATIONS.items()}
    checks.append(near("E f^2 / (E f)^2 of relu", ratios["relu"], math.pi, 1e-4, "paper: pi"))
    data: Data = {"features": [shape[0] for shape in sizes.shapes], "stable_rank": ranks}
    return Outcome(checks, data | {"bound": bounds, "moment_ratio": ratios})


def draw(data: Data) -> Figure:
    """Draw the stable rank and its bound against the number of features."""
    figure, (axes,) = new_figure()
    curves = {"bound from the mean column": data["bound"], "st(relu(V X))": data["stable_rank"]}
    against = {name: dict(zip(data["features"], y, strict=True)) for name, y in curves.items()}
    draw_lines(
        axes, against, "o-", xscale="log", xlabel="features", ylabel="stable rank",
        title="ReLU features: st stays below $\\pi$", ylim=(None, math.pi + 0.05),
    )  # fmt: skip
    tick(axes, data["features"])
    axes.axhline(math.pi, color="0.2", linestyle="--", linewidth=1)
    axes.annotate("$\\pi$", (data["features"][0], math.pi), (-4, 4), textcoords="offset points")
    return figure


EXPERIMENT = Experiment(
    __name__, __doc__, run, draw, Sizes(), Sizes(((64, 32, 128), (256, 128, 512)))
)
