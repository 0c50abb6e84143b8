"""Figure 11 of the criterion paper: on SwiGLU features the two descents cross."""

import math
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch.nn import functional as F

from scripts.experiments import relu_features
from scripts.experiments.check import Check, at_least, at_most, printed
from scripts.experiments.experiment import Data, Experiment, Outcome
from scripts.experiments.regression import Regression, descend, first_steps, gaussian
from scripts.experiments.relu_features import share
from spectral.measures import stable_rank


@dataclass(frozen=True)
class Sizes:
    """Numbers of inputs, features (and outputs), samples and steps."""

    inputs: int = 50
    features: int = 100
    samples: int = 400
    steps: int = 400


# At seed 0, by steps done, from a run with exact decompositions.
GD_LOSS = {10: "0.33", 20: "0.053", 50: "1.4e-3", 100: "1.9e-5", 399: "3e-15"}
SPECTRAL_LOSS = {10: "0.046", 20: "0.0137", 50: "2.4e-3", 100: "5.2e-4", 399: "1.8e-5"}
GD_RANK = {
    0: "52.4", 1: "64.3", 2: "67.0", 10: "50", 20: "35", 50: "13", 100: "4.1", 399: "1.1"
}  # fmt: skip


def problem(sizes: Sizes, seed: int) -> Regression:
    """A = silu(V_1 X) * (V_2 X), Y = W# A."""
    generator = torch.Generator().manual_seed(seed)
    x = gaussian(generator, sizes.inputs, sizes.samples)
    gate, up = (
        gaussian(generator, sizes.features, sizes.inputs) / sizes.inputs**0.5 for _ in range(2)
    )
    truth = gaussian(generator, sizes.features, sizes.features) / sizes.features**0.5
    a = F.silu(gate @ x) * (up @ x)
    return Regression(a, truth @ a)


def run(sizes: Sizes, seed: int, published: bool) -> Outcome:
    """Run both descents and find where they cross."""
    task = problem(sizes, seed)
    stable = float(stable_rank(task.a))
    gd = descend(task, sizes.steps, spectral=False)
    spec = descend(task, sizes.steps, spectral=True)
    ahead = [t for t in range(1, sizes.steps) if spec.losses[t] < gd.losses[t]]
    crossing = max(ahead, default=0) + 1
    often = share(gd.ranks, stable)
    checks = [
        at_least("st(A), above that of ReLU", stable, math.pi, "paper"),
        at_least("steps with SpecGD ahead", len(ahead), 5, "recorded"),
        at_most("last loss of GD / SpecGD", gd.losses[-1] / spec.losses[-1], 1, "paper"),
        at_most("share of GD steps with nr >= st, minority", often, 0.5, "paper"),
    ]
    checks += first_steps(task)
    if published:
        checks += references(gd.losses, spec.losses, gd.ranks)
        checks += [
            printed("st(A)", stable, "28.7", "recorded"),
            Check("step at which GD overtakes", crossing, 40, 45, "recorded"),
            printed("share of GD steps with nr >= st", often, "0.06", "recorded"),
        ]
    data: Data = {
        "stable_rank": stable,
        "crossing": crossing,
        "gd": {"loss": gd.losses, "nuclear_rank": gd.ranks},
        "spectral": {"loss": spec.losses, "nuclear_rank": spec.ranks},
    }
    return Outcome(checks, data)


def references(gd: list[float], spec: list[float], ranks: list[float]) -> list[Check]:
    """Compare losses and ranks with the reference at its steps."""
    series = (("loss of GD", gd, GD_LOSS), ("loss of SpecGD", spec, SPECTRAL_LOSS))
    return [
        printed(f"{name}, step {step}", values[step], expected, "recorded", name)
        for name, values, table in (*series, ("nr of GD", ranks, GD_RANK))
        for step, expected in table.items()
    ]


def draw(data: Data) -> Figure:
    """Draw loss and nuclear rank of both descents, and the step at which they cross."""
    figure = relu_features.draw(data, "SwiGLU features")
    figure.axes[0].axvline(data["crossing"], color="0.4", linestyle=":", linewidth=1)
    return figure


EXPERIMENT = Experiment(
    "gated_features",
    "on SwiGLU features spectral descent leads at first and gradient descent wins",
    "Davis and Drusvyatskiy, figure 11",
    0,
    Sizes(),
    Sizes(inputs=25, features=50, samples=200, steps=200),
    run,
    draw,
)
