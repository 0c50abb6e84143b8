"""Random features A = f(V X) from the criterion paper. The experiments measure the stable rank of A
and minimize |W A - Y|_F^2 / (2 n) by gradient descent and by spectral descent."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.experiments.experiment import Check, Draws, Outcome, Panel, at_least, at_most, near
from spectral import SpectralDescent
from spectral.measures import nuclear_rank, spectral_norm, stable_rank

# With this many steps, msign converges to the polar factor of all gradients that matter here.
POLAR_STEPS = 20
# Relative error of a float64 step once msign has converged.
EXACT = 1e-6
BOUND = math.pi  # E relu^2 / (E relu)^2 = (1/2) / (1 / (2 pi))
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu^2": lambda x: x.relu().square(),
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
RESTARTED = 100
"""Number of spectral descent steps after each restart."""
# The polar factor of a square gradient is orthogonal, so |polar(G) A|_F = |A|_F, and a spectral
# step decreases the loss by exactly the guaranteed amount, up to rounding.
ROUNDING = 1e-9
MODELS = ("realizable", "teacher-student")


@dataclass(frozen=True)
class Regression:
    """The problem min_W |W A - Y|_F^2 / (2 n): W `[rows, features]`, A `[features, n]`, Y
    `[rows, n]`."""

    a: Tensor
    y: Tensor

    def start(self) -> Tensor:
        """Return the initial weight, 0."""
        return self.y.new_zeros(self.y.shape[0], self.a.shape[0])

    def loss(self, w: Tensor) -> Tensor:
        """Return the loss, as a 0-d tensor."""
        return (w @ self.a - self.y).square().sum() / (2 * self.a.shape[1])


def drawn(
    draws: Draws, sizes: tuple[int, int, int], maps: int, feature: Callable[..., Tensor]
) -> Regression:
    """Return the problem with A = feature(V X) and Y = W# A. If `maps` is 2, A is
    feature(V_1 X, V_2 X).

    `sizes` are the number of inputs, features and samples. Rows of V and W# have a mean squared
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
    """Measurements of a run, taken before each step."""

    losses: list[float]
    ranks: list[float]  # nuclear rank of the gradient
    promised: list[float]  # loss decrease that theory guarantees for the step
    weights: list[Tensor]

    def share(self, level: float) -> float:
        """Return the fraction of iterates whose rank is at least `level`."""
        return sum(rank >= level for rank in self.ranks) / len(self.ranks)

    def data(self, level: float) -> dict[str, Any]:
        """Return the data to compare with recorded.yaml."""
        return {"loss": self.losses, "nuclear_rank": self.ranks, "share": self.share(level)}

    def kept(self) -> float:
        """Return the smallest ratio of actual to guaranteed loss decrease."""
        taken = (a - b for a, b in pairwise(self.losses))
        return min(t / p for t, p in zip(taken, self.promised, strict=False))


def descend(
    problem: Regression, steps: int, *, spectral: bool, start: Tensor | None = None
) -> Descent:
    """Run gradient descent with step size 1 / L_F, or spectral descent with step size 1 / L_op.

    L_F = |A|_2^2 / n and L_op = |A|_F^2 / n are the curvatures with respect to the Frobenius norm
    and the spectral norm.
    """
    weight = nn.Parameter(problem.start() if start is None else start.clone())
    optimizer: torch.optim.Optimizer
    n = problem.a.shape[1]
    if spectral:
        curvature = float(problem.a.square().sum()) / n
        lr = 1 / curvature
        optimizer = SpectralDescent([weight], lr=lr, weight_decay=0.0, steps=POLAR_STEPS)
    else:
        curvature = float(spectral_norm(problem.a)) ** 2 / n
        lr = 1 / curvature
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
    """Check the first step of both methods against an SVD of the gradient."""
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


def panels(title: str, stable: float, gd: Descent, spec: Descent) -> list[Panel]:
    """Return panels of the runs' losses and nuclear ranks."""
    runs = {"gradient descent": gd, "spectral descent": spec}
    losses = {name: run.losses for name, run in runs.items()}
    ranks = {name: run.ranks for name, run in runs.items()}
    return [
        Panel(title, losses, y="loss", log="y"),
        Panel("nuclear rank of the gradient", ranks, levels={"st(A)": stable}),
    ]


def pi_bound(
    draws: Draws,
    *,
    shapes: tuple[tuple[int, int, int], ...] = (
        (100, 50, 400), (256, 128, 512), (512, 256, 2048), (1024, 512, 2048), (2048, 1024, 4096),
    ),
) -> Outcome:  # fmt: skip
    """The stable rank of ReLU features stays below pi at any width.

    The experiment compares st(A) for A = relu(V X) with pi and with the bound from the mean column.

    `shapes` lists (features, inputs, samples) for each problem.
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
    # E f(x)^2 / (E f(x))^2 for standard normal x, computed by numerical integration
    grid = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    density = (-grid.square() / 2).exp()
    density = density / density.sum()
    ratios = {}
    for name, activation in ACTIVATIONS.items():
        y = activation(grid)
        ratios[name] = float((density * y.square()).sum() / (density * y).sum().square())
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


def relu_features(
    draws: Draws,
    *,
    sizes: tuple[int, int, int] = (50, 100, 400),
    steps: int = 1000,
    restart: int = 100,
) -> Outcome:
    """Figure 3 of the criterion paper: spectral descent wins on ReLU random features.

    Both methods run on A = relu(V X). Spectral descent is also started from gradient descent
    iterates: the iterate with the highest nuclear rank, and every `restart`-th iterate. For
    `sizes`, see `drawn`.
    """
    task = drawn(draws, sizes, 1, torch.relu)
    stable = float(stable_rank(task.a))
    gd = descend(task, steps, spectral=False)
    spec = descend(task, steps, spectral=True)
    peak = max(range(steps), key=gd.ranks.__getitem__)
    from_peak = descend(task, steps - peak, spectral=True, start=gd.weights[peak])
    restarts = {
        t: descend(task, min(RESTARTED, steps), spectral=True, start=gd.weights[t]).losses
        for t in range(restart, steps, restart)
    }
    early = steps // 5
    ratio = gd.losses[early] / spec.losses[early]
    theory = "theory, eq. 1.5"
    checks = [
        at_least("GD: least decrease / guaranteed", gd.kept(), 1 - ROUNDING, theory),
        at_least("SpecGD: least decrease / guaranteed", spec.kept(), 1 - ROUNDING, theory),
        at_least(f"loss of GD / SpecGD, step {early}", ratio, 1, "paper"),
        at_least("share of GD steps with nr >= st", gd.share(stable), 1, "paper"),
        *first_steps(task),
    ]
    data = {
        "stable_rank": stable,
        "gd": gd.data(stable),
        "spectral": spec.data(stable),
        "peak": peak,
        "from_peak": from_peak.losses,
        "restarts": restarts,
    }
    return Outcome(checks, data, panels("ReLU features: loss", stable, gd, spec))


def gated_features(
    draws: Draws, *, sizes: tuple[int, int, int] = (50, 100, 400), steps: int = 400
) -> Outcome:
    """Figure 11 of the criterion paper: spectral descent is slower on SwiGLU features.

    Both methods run on A = silu(V_1 X) * (V_2 X). For `sizes`, see `drawn`.
    """
    task = drawn(draws, sizes, 2, lambda gate, up: F.silu(gate) * up)
    stable = float(stable_rank(task.a))
    gd = descend(task, steps, spectral=False)
    spec = descend(task, steps, spectral=True)
    ahead = [t for t in range(1, steps) if spec.losses[t] < gd.losses[t]]
    crossing = max(ahead, default=0) + 1
    checks = [
        at_least("st(A), above that of ReLU", stable, math.pi, "paper"),
        at_least("steps with SpecGD ahead", len(ahead), 5, "recorded"),
        at_most("last loss of GD / SpecGD", gd.losses[-1] / spec.losses[-1], 1, "paper"),
        at_most("share of GD steps with nr >= st, minority", gd.share(stable), 0.5, "paper"),
        *first_steps(task),
    ]
    data = {
        "stable_rank": stable,
        "crossing": crossing,
        "gd": gd.data(stable),
        "spectral": spec.data(stable),
    }
    title = f"SwiGLU features: loss, crossing at step {crossing}"
    return Outcome(checks, data, panels(title, stable, gd, spec))


def rank_growth(
    draws: Draws,
    *,
    widths: tuple[int, ...] = (64, 128, 256, 512),
    repeats: int = 3,
    times: tuple[int, ...] = (0, 1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000),
) -> Outcome:
    """Figures 16 and 17 of the criterion paper: after a single step, the gradient's nuclear rank
    grows with the width.

    The experiment computes the nuclear rank for both models at each width and step. The ranks are
    averaged over `repeats` draws.
    """
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
    # In theory, ranks are independent of the width at step 0, and proportional to the width after
    # one step.
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
    return Outcome(checks, {"nuclear_rank": ranks, "stable_rank": stable}, panels)


def problem(draws: Draws, k: int, model: str) -> Regression:
    """Return a problem with A = relu(V X), k features, k / 2 inputs and 2 k samples.

    The labels are W# A (realizable), or W# relu(V# X) computed from other features.
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

    In closed form, the gradients are -C (I - B / L_F)^t with B = A A^T / n and C = Y A^T / n.
    """
    n = task.a.shape[1]
    values, vectors = torch.linalg.eigh(task.a @ task.a.mT / n)
    shrink = 1 - values / values[-1]
    powers = torch.stack([shrink**t for t in times])  # [times, features]
    projected = task.y @ task.a.mT / n @ vectors
    gradient: Tensor = -(projected * powers[:, None]) @ vectors.mT
    return gradient
