"""Figures 16 and 17 of the criterion paper: one step makes the gradient's nuclear rank grow with
the width."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

from scripts.experiments.check import Check, at_least, at_most, near
from scripts.experiments.experiment import Data, Experiment, Outcome
from scripts.experiments.regression import Regression, gaussian
from scripts.plots.style import draw_lines, new_figure, tick
from spectral.measures import nuclear_rank, stable_rank


@dataclass(frozen=True)
class Sizes:
    """Widths k (inputs k / 2, samples 2 k), number of seeds, steps at which to measure."""

    widths: tuple[int, ...] = (64, 128, 256, 512)
    seeds: int = 3
    times: tuple[int, ...] = (0, 1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)


MODELS = ("realizable", "teacher-student")


def problem(width: int, model: str, seed: int) -> Regression:
    """A = relu(V X) with labels W# A, or labels of other features, W# relu(V# X)."""
    generator = torch.Generator().manual_seed(seed)
    inputs, samples = width // 2, 2 * width
    x = gaussian(generator, inputs, samples)
    v = gaussian(generator, width, inputs)
    a = (v @ x).relu()
    truth = gaussian(generator, width, width)
    if model == "realizable":
        return Regression(a, truth @ a)
    return Regression(a, truth @ (gaussian(generator, width, inputs) @ x).relu())


def gradients(task: Regression, times: Sequence[int]) -> Tensor:
    """The gradients `[times, rows, features]` of gradient descent from zero with step 1 / L_F.

    In closed form, -C (I - B / L_F)^t with B = A A^T / n and C = Y A^T / n.
    """
    n = task.a.shape[1]
    values, vectors = torch.linalg.eigh(task.a @ task.a.mT / n)
    shrink = 1 - values / values[-1]
    powers = torch.stack([shrink**t for t in times])  # [times, features]
    projected = task.y @ task.a.mT / n @ vectors
    gradient: Tensor = -(projected * powers[:, None]) @ vectors.mT
    return gradient


def run(sizes: Sizes, seed: int) -> Outcome:
    """Compute mean nuclear ranks over the seeds, of both models, by width and step."""
    seeds = range(seed, seed + sizes.seeds)
    ranks: dict[str, dict[int, dict[int, float]]] = {model: {} for model in MODELS}
    stable = {}
    for width in sizes.widths:
        for model in MODELS:
            tasks = [problem(width, model, each) for each in seeds]
            by_time = torch.stack([nuclear_rank(gradients(task, sizes.times)) for task in tasks])
            ranks[model][width] = dict(zip(sizes.times, by_time.mean(0).tolist(), strict=True))
            if model == "realizable":
                stable[width] = float(torch.stack([stable_rank(t.a) for t in tasks]).mean())
    checks = properties(sizes, ranks)
    return Outcome(checks, {"nuclear_rank": ranks, "stable_rank": stable})


def properties(sizes: Sizes, ranks: dict[str, dict[int, dict[int, float]]]) -> list[Check]:
    """Check the paper's theory: constant at first, proportional to the width after a step."""
    checks = []
    for model, by_width in ranks.items():
        initial = max(values[0] for values in by_width.values())
        growth = min(values[1] / width for width, values in by_width.items())
        small, large = sizes.widths[0], sizes.widths[-1]
        ratio = by_width[large][1] / by_width[small][1]
        checks += [
            at_most(f"{model}: largest nr at step 0", initial, 10, "paper"),
            at_least(f"{model}: least nr / k at step 1", growth, 0.3, "paper"),
            near(f"{model}: growth of nr at step 1 from k = {small} to {large}", ratio,
                 large / small, 0.1, "paper: linear"),
        ]  # fmt: skip
    return checks


def draw(data: Data) -> Figure:
    """Draw the nuclear rank against the step (figure 16), and at steps 0 and 1 against k (17)."""
    figure, axes = new_figure(3, width=4.2)
    for axis, model in zip(axes[:2], MODELS, strict=True):
        curves = {f"k = {width}": values for width, values in data["nuclear_rank"][model].items()}
        axis.set_xscale("symlog", linthresh=1)
        draw_lines(axis, curves, "o-", yscale="log", xlabel="step of gradient descent",
                   ylabel="nuclear rank of the gradient", title=model)  # fmt: skip
    for model, style in zip(MODELS, ("o-", "o--"), strict=True):
        by_width = data["nuclear_rank"][model]
        at = [{width: [*values.values()][i] for width, values in by_width.items()} for i in (0, 1)]
        draw_lines(axes[2], {f"step {i}, {model}": at[i] for i in (0, 1)}, style, xscale="log",
                   yscale="log", xlabel="k", title="before and after one step")  # fmt: skip
    tick(axes[2], [*by_width])
    return figure


EXPERIMENT = Experiment(__name__, __doc__, run, draw, Sizes(), Sizes((64, 128), 2, (0, 1, 10, 100)))
