"""A weight whose singular values are all mapped to 1 cannot represent a target with other values.

The over-flattening ablation of the PC paper (appendix J) maps all singular values to 1. Here one
matrix learns a linear map with singular values 1 / k: as a plain weight, in a PC layer, and with
the over-flattening composite. The best multiple of an orthogonal matrix has the relative error
1 - nr(T) / n for the target T, so the composite is worst with any optimizer. This is not evidence
about language models, for which the paper reports a worse loss at 271M parameters and
studies/pc/over_flattening.yaml tests a small model.
"""

from typing import Any

import torch
from torch import Tensor, nn

from scripts.experiments.experiment import Draws, Outcome, Panel, at_least, at_most, near
from spectral import AdamW, Muon
from spectral.effective_weight import Preconditioner
from spectral.measures import nuclear_rank
from spectral.odd_polynomial import Level, evaluate
from spectral.singular_triplets import top_singular

SMALL = {"side": 12, "steps": 60, "adamw": 4e-2, "muon": 1e-1}
LEVELS: dict[str, dict[str, Level | None]] = {
    "AdamW": {"no PC": None, "PC level 4": 4, "over-flattening": "over_flattening"},
    "Muon": {"no PC": None, "PC level 2": 2, "over-flattening": "over_flattening"},
}
"""The compared variants of each optimizer: no PC layer, the paper's level, and the ablation."""
# Slope at zero of the composite in appendix J: the product of its polynomials' first coefficients.
SLOPE = 20775.0


def experiment(
    draws: Draws, *, side: int = 48, steps: int = 300, adamw: float = 1e-2, muon: float = 3e-2
) -> Outcome:
    """Train all variants from the same initial weight to the same target, and check the composite.

    `adamw` and `muon` are peak learning rates.
    """
    left, right = (torch.linalg.qr(draws.normal(side, side))[0] for _ in range(2))
    target = left * (1 / torch.arange(1, side + 1, dtype=torch.float64)) @ right
    start = draws.normal(side, side) / (2 * side**0.5)
    floor = 1 - float(nuclear_rank(target)) / side
    losses: dict[str, dict[str, list[float]]] = {name: {} for name in LEVELS}
    for name, levels in LEVELS.items():
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
    """gamma W, or gamma s g(W / s) with a tracked top singular pair."""

    def __init__(self, start: Tensor, level: Level | None) -> None:
        super().__init__()
        self.level = level
        self.weight, self.gamma = nn.Parameter(start.clone()), nn.Parameter(start.new_ones(1))
        self.u, self.v = start.new_zeros(1, len(start)), start.new_zeros(1, start.shape[1])

    def forward(self) -> Tensor:
        """Return the effective weight."""
        if self.level is None:
            return self.gamma * self.weight
        pair = top_singular(self.weight.detach()[None], self.u, self.v, steps=16)
        self.u, self.v = pair[1:]
        pc = Preconditioner(level=self.level)
        return self.gamma * pc.effective(self.weight[None], self.u, self.v, 1.0)[0]


def train(
    layer: Layer, optimizer: torch.optim.Optimizer, target: Tensor, steps: int
) -> list[float]:
    """Train; return the loss before each step, |effective W - T|_F^2 / |T|_F^2, which is the error
    on isotropic inputs."""
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
