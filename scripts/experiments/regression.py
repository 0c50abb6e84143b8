"""Random-feature regression: gradient and spectral descent on |W A - Y|_F^2 / (2 n)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scripts.experiments.experiment import Check, Draws, Panel, at_most
from spectral import SpectralDescent
from spectral.measures import nuclear_rank, spectral_norm

# With this number of steps, msign is the exact polar factor of all relevant gradients.
POLAR_STEPS = 20
# Relative error of a step in float64 with converged msign.
EXACT = 1e-6


@dataclass(frozen=True)
class Regression:
    """The problem min_W |W A - Y|_F^2 / (2 n): W `[rows, features]`, A `[features, n]`, Y
    `[rows, n]`."""

    a: Tensor
    y: Tensor

    @property
    def euclidean(self) -> float:
        """L_F = |A|_2^2 / n, the curvature in the Frobenius norm."""
        return float(spectral_norm(self.a)) ** 2 / self.a.shape[1]

    @property
    def spectral(self) -> float:
        """L_op = |A|_F^2 / n, the curvature in the spectral norm."""
        return float(self.a.square().sum()) / self.a.shape[1]

    def start(self) -> Tensor:
        """Return the initial weight, 0."""
        return self.y.new_zeros(self.y.shape[0], self.a.shape[0])

    def loss(self, w: Tensor) -> Tensor:
        """Return the loss `[]`."""
        return (w @ self.a - self.y).square().sum() / (2 * self.a.shape[1])


def random_features(
    draws: Draws, sizes: tuple[int, int, int], maps: int, feature: Callable[..., Tensor]
) -> Regression:
    """Return the problem with A = feature(V X) and Y = W# A, where `feature` gets `maps` different
    V X.

    `sizes` are the numbers of inputs, features and samples; rows of V and W# have a mean squared
    length of 1.
    """
    inputs, features, samples = sizes
    x = draws.normal(inputs, samples)
    v = [draws.normal(features, inputs) for _ in range(maps)]
    truth = draws.normal(features, features) / features**0.5
    a = feature(*(each / inputs**0.5 @ x for each in v))
    return Regression(a, truth @ a)


@dataclass(frozen=True)
class Descent:
    """A run: figures of the iterate before each step."""

    losses: list[float]
    ranks: list[float]  # nuclear rank of the gradient
    promised: list[float]  # decrease of the loss that theory guarantees for the step
    weights: list[Tensor]

    def share(self, level: float) -> float:
        """Return the fraction of iterates whose rank is at least `level`."""
        return sum(rank >= level for rank in self.ranks) / len(self.ranks)

    def data(self, level: float) -> dict[str, Any]:
        """Return the run's data for recorded.yaml."""
        return {"loss": self.losses, "nuclear_rank": self.ranks, "share": self.share(level)}

    def kept(self) -> float:
        """Return the smallest ratio of actual to guaranteed decrease."""
        taken = (a - b for a, b in zip(self.losses, self.losses[1:], strict=False))
        return min(t / p for t, p in zip(taken, self.promised, strict=False))


def descend(
    problem: Regression, steps: int, *, spectral: bool, start: Tensor | None = None
) -> Descent:
    """Run gradient descent with step size 1 / L_F, or spectral descent with step size 1 / L_op."""
    weight = nn.Parameter(problem.start() if start is None else start.clone())
    optimizer: torch.optim.Optimizer
    if spectral:
        lr = 1 / problem.spectral
        optimizer = SpectralDescent([weight], lr=lr, weight_decay=0.0, steps=POLAR_STEPS)
    else:
        lr = 1 / problem.euclidean
        optimizer = torch.optim.SGD([weight], lr=lr)
    run = Descent([], [], [], [])
    for _ in range(steps):
        run.weights.append(weight.detach().clone())
        loss = problem.loss(weight)
        optimizer.zero_grad()
        loss.backward()
        assert weight.grad is not None
        rank, energy = float(nuclear_rank(weight.grad)), float(weight.grad.square().sum())
        run.losses.append(loss.item())
        run.ranks.append(rank)
        # |G|_*^2 / (2 L_op) = nr |G|_F^2 / (2 L_op), or |G|_F^2 / (2 L_F)
        run.promised.append(lr / 2 * energy * (rank if spectral else 1))
        optimizer.step()
    return run


def first_steps(problem: Regression) -> list[Check]:
    """Check the first step of both descents against an SVD of the gradient."""
    n = problem.a.shape[1]
    start = problem.start()
    gradient = (start @ problem.a - problem.y) @ problem.a.mT / n
    left, values, right = torch.linalg.svd(gradient, full_matrices=False)
    a = torch.linalg.svdvals(problem.a)
    expected = {
        False: -gradient * n / a[0].square(),
        True: -(left @ right) * values.sum() * n / a.square().sum(),
    }
    checks = []
    for spectral, step in expected.items():
        change = descend(problem, 2, spectral=spectral).weights[1] - start
        error = float((change - step).norm() / step.norm())
        name = "SpecGD" if spectral else "GD"
        checks.append(at_most(f"{name}: error of the first step", error, EXACT, "theory: SVD"))
    return checks


def panels(title: str, stable: float, runs: Mapping[str, Descent]) -> list[Panel]:
    """Return panels of the runs' losses and nuclear ranks."""
    losses = {name: run.losses for name, run in runs.items()}
    ranks = {name: run.ranks for name, run in runs.items()}
    return [
        Panel(title, losses, y="loss", log="y"),
        Panel("nuclear rank of the gradient", ranks, levels={"st(A)": stable}),
    ]
