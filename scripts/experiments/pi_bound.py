"""The stable rank of ReLU features stays below pi for any width."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from scripts.experiments.experiment import Draws, Outcome, Panel, at_least, at_most, near
from spectral.measures import stable_rank

SMALL = {"shapes": ((64, 32, 128), (256, 128, 512))}
BOUND = math.pi  # E relu^2 / (E relu)^2 = (1/2) / (1 / (2 pi))
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu^2": lambda x: x.relu().square(),
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


def experiment(
    draws: Draws,
    *,
    shapes: tuple[tuple[int, int, int], ...] = (
        (100, 50, 400), (256, 128, 512), (512, 256, 2048), (1024, 512, 2048), (2048, 1024, 4096),
    ),
) -> Outcome:  # fmt: skip
    """Compare st(A) of A = relu(V X) with pi and with the bound from the mean column.

    `shapes` contains (features, inputs, samples) of each problem.
    """
    ranks, bounds, by_svd = {}, {}, []
    for features, inputs, samples in shapes:
        x = draws.normal(inputs, samples)
        a = (draws.normal(features, inputs) @ x).relu()
        values = torch.linalg.svdvals(a)
        ranks[features] = float(stable_rank(a))
        bounds[features] = float(a.square().sum(0).mean() / a.mean(1).square().sum())
        exact = float((values / values[0]).square().sum())
        by_svd.append(near(f"st(A), {features} features, against an SVD", ranks[features], exact,
                           1e-9, "theory: SVD", "by SVD"))  # fmt: skip
    st = [*ranks.values()]
    ratios = {name: moment_ratio(activation) for name, activation in ACTIVATIONS.items()}
    checks = [
        at_most("largest st(A), against pi", max(st), BOUND, "paper"),
        at_most("largest st(A) / bound from the mean column",
                max(rank / bounds[k] for k, rank in ranks.items()), 1, "paper, 2.1"),
        at_least("st of the widest - st of the narrowest", st[-1] - st[0], 0, "paper"),
        *by_svd,
        near("E f^2 / (E f)^2 of relu", ratios["relu"], math.pi, 1e-4, "paper: pi"),
    ]  # fmt: skip
    panel = Panel(
        "ReLU features: st stays below pi",
        {"bound from the mean column": bounds, "st(relu(V X))": ranks},
        x="features", y="stable rank", log="x", levels={"pi": math.pi},
    )  # fmt: skip
    return Outcome(checks, {"stable_rank": st, "bound": bounds, "moment_ratio": ratios}, [panel])


def moment_ratio(activation: Callable[[Tensor], Tensor]) -> float:
    """Return E f(x)^2 / (E f(x))^2 for a standard normal x, by numerical integration."""
    x = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    density = (-x.square() / 2).exp()
    density = density / density.sum()
    y = activation(x)
    return float((density * y.square()).sum() / (density * y).sum().square())
