"""The stable rank of ReLU features stays below pi, however wide they are."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from scripts.experiments.check import at_least, at_most, equal, near, printed
from scripts.experiments.experiment import Data, Experiment, Outcome
from scripts.experiments.regression import gaussian
from scripts.plots.style import new_figure
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
# For other draws of the same shapes: st of two draws of the narrowest differs by half a percent.
SCATTER = 0.01
STABLE_RANKS = (2.99, 3.11, 3.120, 3.127, 3.135)
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "relu": (torch.relu, "3.1416"),
    "relu^2": (lambda x: x.relu().square(), "6.00"),
    "gelu": (F.gelu, "5.34"),
    "silu": (F.silu, "8.33"),
    "sigmoid": (torch.sigmoid, "1.17"),
}


def moment_ratio(activation: Callable[[Tensor], Tensor]) -> float:
    """E f(x)^2 / (E f(x))^2 for a standard normal x, by the trapezoidal rule."""
    x = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    density = (-x.square() / 2).exp()
    density = density / density.sum()
    y = activation(x)
    return float((density * y.square()).sum() / (density * y).sum().square())


def run(sizes: Sizes, seed: int, published: bool) -> Outcome:
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
        equal(f"st(A), {shape[0]} features, against an SVD", rank, exact, "theory: SVD", "by SVD")
        for shape, rank, exact in zip(sizes.shapes, ranks, by_svd, strict=True)
    ]
    for name, (activation, ratio) in ACTIVATIONS.items():
        source = "paper: pi" if name == "relu" else "recorded"
        checks.append(
            printed(f"E f^2 / (E f)^2 of {name}", moment_ratio(activation), ratio, source)
        )
    if published:
        checks += [
            near(f"st(A), {features} features", rank, expected, SCATTER, "recorded", "st(A)")
            for (features, _, _), rank, expected in zip(
                sizes.shapes, ranks, STABLE_RANKS, strict=True
            )
        ]
    shapes = [list(shape) for shape in sizes.shapes]
    return Outcome(checks, {"shapes": shapes, "stable_rank": ranks, "bound": bounds})


def draw(data: Data) -> Figure:
    """Draw the stable rank and its bound against the number of features."""
    figure, (axes,) = new_figure()
    features = [shape[0] for shape in data["shapes"]]
    axes.plot(features, data["bound"], "s--", label="bound from the mean column", linewidth=1.0)
    axes.plot(features, data["stable_rank"], "o-", label="st(relu(V X))")
    axes.axhline(math.pi, color="0.2", linestyle="--", linewidth=1)
    axes.annotate(
        "$\\pi$", (features[0], math.pi), textcoords="offset points", xytext=(-4, 4), fontsize=12
    )
    axes.set(
        xscale="log",
        xlabel="features",
        ylabel="stable rank",
        title="ReLU features: st stays below $\\pi$",
    )
    axes.set_xticks(features, [str(f) for f in features])
    axes.minorticks_off()
    axes.set_ylim(top=math.pi + 0.05)
    axes.legend(loc="lower right")
    return figure


EXPERIMENT = Experiment(
    "pi_bound",
    "the stable rank of ReLU features stays below pi",
    "Davis and Drusvyatskiy, section 2.2",
    0,
    Sizes(),
    Sizes(((64, 32, 128), (256, 128, 512))),
    run,
    draw,
)
