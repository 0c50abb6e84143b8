"""PC layers: convergence of deep linear networks, and the over-flattening ablation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from scripts.experiments.experiment import Check, Draws, Outcome, Panel, at_least, at_most, near
from spectral import AdamW, Muon
from spectral.effective_weight import Preconditioner
from spectral.measures import modified_condition_number, nuclear_rank, singular_values
from spectral.odd_polynomial import Level, evaluate
from spectral.singular_triplets import top_singular

LEVELS = (0, 1, 2, 3, 4)
PAPER = {
    1: (1.507, -0.507),
    2: (2.083, -1.643, 0.560),
    3: (2.909, -4.649, 4.023, -1.283),
    4: (3.625, -9.261, 14.097, -10.351, 2.890),
}
"""Coefficients of x, x^3, x^5, ... by level, as printed in the paper."""
SCALE = 1.7
# Relative tolerance, above the norm's epsilon of 1e-7.
EXACT = 1e-6
TARGET = 0.01
"""Target loss as a fraction of the initial loss."""
ROOM = 1.1
"""tau of every layer, an assumed bound on the layer's norm. The bounds set the step size. A check
verifies the bounds afterwards."""
VARIANTS: dict[str, dict[str, Level | None]] = {
    "AdamW": {"no PC": None, "PC level 4": 4, "over-flattening": "over_flattening"},
    "Muon": {"no PC": None, "PC level 2": 2, "over-flattening": "over_flattening"},
}
"""Variants to compare for each optimizer: no PC layer, the paper's level, and the ablation."""
# Slope at zero of the composite in appendix J: the product of its polynomials' linear coefficients.
SLOPE = 20775.0


def deep_linear(
    draws: Draws,
    *,
    widths: tuple[int, ...] = (16, 24, 24, 12),
    samples: int = 12,
    steps: int = 3000,
    smallest: float = 0.2,
    residual: float = 0.3,
) -> Outcome:
    """Theorem 1 of the PC paper: gradient descent on a deep linear network with well-conditioned
    weights converges at least geometrically, and faster with better conditioning.

    For every level, the experiment trains two networks. The first network has plain weights, which
    are preconditioned once at the start. The second network has PC layers, whose raw weights are
    trained. All levels start from the same raw weights and initial residual. `widths` must first
    increase, then decrease. The singular values of a raw weight decay geometrically from 1 to
    `smallest`. `residual` is the norm of the initial residual.
    """
    raw = []
    for cols, rows in pairwise(widths):
        left, _, right = torch.linalg.svd(draws.normal(rows, cols), full_matrices=False)
        values = torch.logspace(0, math.log10(smallest), min(rows, cols), dtype=torch.float64)
        raw.append(left * values @ right)
    x = torch.linalg.qr(draws.normal(widths[0], samples))[0]
    error = draws.normal(widths[-1], samples)
    error = error * residual / torch.linalg.matrix_norm(error)
    lr = 1 / smoothness(x, residual**2 / 2, [ROOM] * len(raw))
    checks, plain, layers, kappas = definition(draws), [], [], []
    for level in LEVELS:
        weights = [effective(w, level) for w in raw]
        y = product(weights, x) + error
        plain.append(descend(weights, x, y, lr, steps, None))
        layers.append(descend(raw, x, y, lr, steps, level))
        kappas.append(max(float(modified_condition_number(w)) for w in weights))
        checks += theorem(level, plain[-1], x, lr)
    checks += faster("plain weights", plain) + faster("PC layers", layers)
    names = [f"{n} ({kappa:.1f})" for n, kappa in zip(LEVELS, kappas, strict=True)]
    panels = [
        Panel(f"{title}: level (condition number)",
              {name: {i: loss / run.losses[0] for i, loss in enumerate(run.losses, 1)}
               for name, run in zip(names, runs, strict=True)},
              x="iterate", y="loss / first loss", log="xy", levels={"target": TARGET})
        for title, runs in (("preconditioned once", plain), ("PC layers", layers))
    ]  # fmt: skip
    data = {
        "levels": LEVELS,
        "condition_number": kappas,
        "learning_rate": lr,
        "plain": [run.losses for run in plain],
        "pc": [run.losses for run in layers],
    }
    return Outcome(checks, data, panels)


@dataclass(frozen=True)
class Descent:
    """The loss and the singular values of all layers before every step."""

    losses: list[float] = field(default_factory=list)
    values: list[list[Tensor]] = field(default_factory=list)


def effective(w: Tensor, level: int) -> Tensor:
    """Return PC(W) of a matrix, using gamma = 1 and the exact top singular pair."""
    batch = w.detach()[None]
    zeros = batch.new_zeros(1, w.shape[0]), batch.new_zeros(1, w.shape[1])
    _, u, v = top_singular(batch, *zeros, steps=min(w.shape))
    return Preconditioner(level=level).effective(w[None], u, v, 1.0)[0]


def definition(draws: Draws) -> list[Check]:
    """Check PC(W) = s g(W / s) for a W with norm `SCALE` and known singular vectors. Also check
    that the gradient of PC(W) is orthogonal to W, because W / s is independent of the scale of W.
    """
    rows, cols = 18, 11
    left, _ = torch.linalg.qr(draws.normal(rows, cols))
    right, _ = torch.linalg.qr(draws.normal(cols, cols))
    x = torch.linspace(1, 0.05, cols, dtype=torch.float64)
    direction = draws.normal(rows, cols)
    checks = []
    for level, coefficients in PAPER.items():
        w = (SCALE * left * x @ right.mT).requires_grad_()
        g = sum((a * x ** (2 * i + 1) for i, a in enumerate(coefficients)), torch.zeros_like(x))
        weight = effective(w, level)
        error = float((weight.detach() - SCALE * left * g @ right.mT).norm() / SCALE)
        (slope,) = torch.autograd.grad((weight * direction).sum(), w)
        radial = float((slope * w.detach()).sum() / slope.norm() / w.detach().norm())
        checks += [
            at_most(f"level {level}: error of PC(W)", error, EXACT, "paper, coefficients", "PC(W)"),
            at_most(f"level {level}: cosine of gradient and W", abs(radial), EXACT,
                    "theory: W / s has no scale", "gradient"),
        ]  # fmt: skip
    return checks


def product(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """Return W_L ... W_1 X."""
    for w in weights:
        x = w @ x
    return x


def descend(
    start: Sequence[Tensor], x: Tensor, y: Tensor, lr: float, steps: int, level: int | None
) -> Descent:
    """Run gradient descent on the weights. If `level` is not None, the weights are the raw weights
    of PC layers."""
    parameters = [nn.Parameter(w.clone()) for w in start]
    optimizer = torch.optim.SGD(parameters, lr=lr)
    run = Descent()
    for _ in range(steps):
        weights = parameters if level is None else [effective(w, level) for w in parameters]
        loss = (product(weights, x) - y).square().sum() / 2
        run.losses.append(loss.item())
        run.values.append([singular_values(w.detach()) for w in weights])
        if loss.item() <= TARGET / 2 * run.losses[0]:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return run


def smoothness(x: Tensor, loss: float, largest: Sequence[float]) -> float:
    """Return beta = (prod tau)^2 (sqrt(2 L_0) + |X|_F) L |X|_2, where each tau is at least 1."""
    tau = math.prod(max(1.0, each) for each in largest)
    norm = float(torch.linalg.matrix_norm(x))
    return tau**2 * (math.sqrt(2 * loss) + norm) * len(largest) * float(singular_values(x)[0])


def theorem(level: int, descent: Descent, x: Tensor, lr: float) -> list[Check]:
    """Check the premise lr <= 1 / beta and the conclusion of theorem 1 along a trajectory."""
    layers = [*zip(*descent.values, strict=True)]
    largest = [max(float(values[0]) for values in layer) for layer in layers]
    smallest = [min(float(values[-1]) for values in layer) for layer in layers]
    beta = smoothness(x, descent.losses[0], largest)
    # mu = (prod mu_l)^2 sigma_min(X)^2, where each mu_l is at most 1
    least = math.prod(min(1.0, each) for each in smallest)
    mu = least**2 * float(singular_values(x)[-1]) ** 2
    promised = 1 - lr * mu
    ratios = [b / a for a, b in pairwise(descent.losses)]
    return [
        at_most(f"level {level}: lr beta", lr * beta, 1, "theory, premise", "lr beta"),
        at_most(f"level {level}: worst L(t+1) / L(t) over 1 - lr mu", max(ratios) / promised, 1,
                "paper, theorem 1", "theorem 1"),
    ]  # fmt: skip


def faster(name: str, descents: Sequence[Descent]) -> list[Check]:
    """Check that each level reaches the target in fewer steps than the level below."""
    steps = []  # of each level, up to the target
    for each in descents:
        goal, losses = TARGET * each.losses[0], each.losses
        steps.append(next((t for t, loss in enumerate(losses) if loss <= goal), len(losses)))
    return [
        at_most(f"{name}: steps at level {level} / level {level - 1}", after / before, 1,
                "paper, corollary 1", f"{name}: steps")
        for level, (before, after) in zip(LEVELS[1:], pairwise(steps), strict=True)
    ]  # fmt: skip


def over_flattening(
    draws: Draws, *, side: int = 48, steps: int = 300, adamw: float = 1e-2, muon: float = 3e-2
) -> Outcome:
    """A weight whose singular values are all mapped to 1 cannot represent a target with other
    singular values.

    The over-flattening ablation of the PC paper (appendix J) maps all singular values to 1. Here, a
    matrix learns a linear map with singular values 1 / k in three ways, each from the same initial
    weight: as a plain weight, in a PC layer, and with the over-flattening composite. For a target
    T `[n, n]` with nuclear rank nr(T), the best multiple of an orthogonal matrix has a relative
    error of 1 - nr(T) / n. The composite therefore has the largest error with any optimizer. The
    experiment is not evidence about language models. The paper reports that over-flattening worsens
    the loss of a language model with 271M parameters; studies/pc/over_flattening.yaml tests a small
    model.

    `adamw` and `muon` are peak learning rates.
    """
    left, right = (torch.linalg.qr(draws.normal(side, side))[0] for _ in range(2))
    target = left * (1 / torch.arange(1, side + 1, dtype=torch.float64)) @ right
    start = draws.normal(side, side) / (2 * side**0.5)
    floor = 1 - float(nuclear_rank(target)) / side
    losses: dict[str, dict[str, list[float]]] = {name: {} for name in VARIANTS}
    for name, levels in VARIANTS.items():
        for variant, level in levels.items():
            layer = Layer(start, level)
            scalar: dict[str, Any] = {"params": [layer.gamma], "rule": "adamw", "lr": adamw}
            matrix = {"params": [layer.weight], "lr": adamw if name == "AdamW" else muon}
            rule = AdamW if name == "AdamW" else Muon
            optimizer = rule([matrix, scalar], weight_decay=0.0)
            losses[name][variant] = train(layer, optimizer, target, steps)
    x = torch.logspace(-3, 0, 400, dtype=torch.float64)
    tiny = torch.tensor(1e-12, dtype=torch.float64)
    flat = float((evaluate(x, "over_flattening") - 1).abs().max())
    slope = float(evaluate(tiny, "over_flattening") / tiny)
    checks = [
        at_most("composite: largest |g - 1| on [1e-3, 1]", flat, 1e-3, "paper, figure 12"),
        near("composite: slope at zero", slope, SLOPE, 1e-3, "paper, appendix J"),
    ]
    for name, by_variant in losses.items():
        plain, pc, flattened = (run[-1] for run in by_variant.values())
        checks += [
            at_least(f"{name}: last loss, over-flattening / no PC", flattened / plain, 1, "theory"),
            at_least(f"{name}: last loss, over-flattening / PC", flattened / pc, 1, "theory"),
            at_least(f"{name}: last loss of over-flattening / 1 - nr(T) / n", flattened / floor,
                     0.9, "theory: best orthogonal fit"),
        ]  # fmt: skip
    best = {"best orthogonal fit": floor}
    panels = [Panel(n, runs, y="relative loss", log="y", levels=best) for n, runs in losses.items()]
    return Outcome(checks, {"losses": losses, "floor": floor}, panels)


class Layer(nn.Module):
    """The weight gamma W, or gamma s g(W / s) with a tracked top singular pair."""

    def __init__(self, start: Tensor, level: Level | None) -> None:
        super().__init__()
        self.level = level
        self.weight, self.gamma = nn.Parameter(start.clone()), nn.Parameter(start.new_ones(1))
        self.u, self.v = start.new_zeros(1, len(start)), start.new_zeros(1, start.shape[1])

    def forward(self) -> Tensor:
        """Compute the effective weight."""
        if self.level is None:
            return self.gamma * self.weight
        pair = top_singular(self.weight.detach()[None], self.u, self.v, steps=16)
        self.u, self.v = pair[1:]
        pc = Preconditioner(level=self.level)
        return self.gamma * pc.effective(self.weight[None], self.u, self.v, 1.0)[0]


def train(
    layer: Layer, optimizer: torch.optim.Optimizer, target: Tensor, steps: int
) -> list[float]:
    """Train and return the loss before each step: |effective W - T|_F^2 / |T|_F^2, which is the
    error on isotropic inputs."""
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    losses = []
    for _ in range(steps):
        loss = (layer() - target).square().sum() / target.square().sum()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return losses
