"""Figures 16 and 17 of the criterion paper: one step makes the gradient's nuclear rank grow with
the width."""

from collections.abc import Sequence

import torch
from torch import Tensor

from scripts.experiments.experiment import Check, Draws, Outcome, Panel, at_least, at_most, near
from scripts.experiments.regression import Regression
from spectral.measures import nuclear_rank, stable_rank

SMALL = {"widths": (64, 128), "repeats": 2, "times": (0, 1, 10, 100)}
MODELS = ("realizable", "teacher-student")


def problem(draws: Draws, k: int, model: str) -> Regression:
    """Return a problem with A = relu(V X): k features, k / 2 inputs and 2 k samples.

    The labels are W# A (realizable), or W# relu(V# X) from other features.
    """
    x = draws.normal(k // 2, 2 * k)
    a = (draws.normal(k, k // 2) @ x).relu()
    truth = draws.normal(k, k)
    if model == "realizable":
        return Regression(a, truth @ a)
    return Regression(a, truth @ (draws.normal(k, k // 2) @ x).relu())


def gradients(task: Regression, times: Sequence[int]) -> Tensor:
    """Return the gradients `[times, rows, features]` of gradient descent from zero with step size
    1 / L_F.

    Their closed form is -C (I - B / L_F)^t with B = A A^T / n and C = Y A^T / n.
    """
    n = task.a.shape[1]
    values, vectors = torch.linalg.eigh(task.a @ task.a.mT / n)
    shrink = 1 - values / values[-1]
    powers = torch.stack([shrink**t for t in times])  # [times, features]
    projected = task.y @ task.a.mT / n @ vectors
    gradient: Tensor = -(projected * powers[:, None]) @ vectors.mT
    return gradient


def experiment(
    draws: Draws,
    *,
    widths: tuple[int, ...] = (64, 128, 256, 512),
    repeats: int = 3,
    times: tuple[int, ...] = (0, 1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000),
) -> Outcome:
    """Compute the mean nuclear rank over `repeats` draws for both models by width and step."""
    ranks: dict[str, dict[int, dict[int, float]]] = {model: {} for model in MODELS}
    stable = {}
    for k in widths:
        for model in MODELS:
            tasks = [problem(draws.restarted(i), k, model) for i in range(repeats)]
            by_time = torch.stack([nuclear_rank(gradients(task, times)) for task in tasks])
            ranks[model][k] = dict(zip(times, by_time.mean(0).tolist(), strict=True))
            if model == "realizable":
                stable[k] = float(torch.stack([stable_rank(task.a) for task in tasks]).mean())
    panels = [
        Panel(model, {f"k = {k}": ranks[model][k] for k in widths}, x="step of gradient descent",
              y="nuclear rank of the gradient", log="xy")
        for model in MODELS
    ]  # fmt: skip
    one, two = (
        {f"step {t}, {model}": {k: ranks[model][k][t] for k in widths} for t in (0, 1)}
        for model in MODELS
    )
    panels.append(Panel("before and after one step", one, two, x="k", log="xy"))
    data = {"nuclear_rank": ranks, "stable_rank": stable}
    return Outcome(properties(ranks), data, panels)


def properties(ranks: dict[str, dict[int, dict[int, float]]]) -> list[Check]:
    """Check the paper's theory: ranks do not depend on the width at step 0, and are proportional to
    the width after one step."""
    checks = []
    for model, by_width in ranks.items():
        initial = max(values[0] for values in by_width.values())
        growth = min(values[1] / width for width, values in by_width.items())
        small, *_, large = by_width
        ratio = by_width[large][1] / by_width[small][1]
        checks += [
            at_most(f"{model}: largest nr at step 0", initial, 10, "paper"),
            at_least(f"{model}: least nr / k at step 1", growth, 0.3, "paper"),
            near(f"{model}: growth of nr at step 1 from k = {small} to {large}", ratio,
                 large / small, 0.1, "paper: linear"),
        ]  # fmt: skip
    return checks
