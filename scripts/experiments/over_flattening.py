"""A weight whose singular values are all mapped to 1 cannot represent a target with other ones.

This is what the over-flattening ablation of the PC paper (appendix J) does to a weight, on one
matrix that learns a linear map with singular values 1 / k: plain, behind a PC layer, and behind the
over-flattening composite. The best multiple of an orthogonal matrix leaves 1 - nr(T) / n of the
target T, so that the composite loses whatever the optimizer. It is not evidence that it loses in a
language model, as the paper finds at 271M parameters: studies/pc/over_flattening.yaml asks
that of a small one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from scripts.experiments.check import at_least, at_most, near
from scripts.experiments.experiment import Data, Experiment, Outcome
from scripts.experiments.regression import gaussian
from scripts.plots.style import draw_lines, new_figure
from spectral import AdamW, Muon
from spectral.effective_weight import Preconditioner
from spectral.measures import nuclear_rank
from spectral.odd_polynomial import Level, evaluate
from spectral.singular_triplets import top_singular


@dataclass(frozen=True)
class Sizes:
    """Side of the matrix, steps, peak learning rates (linear to zero)."""

    side: int = 48
    steps: int = 300
    adamw: float = 1e-2
    muon: float = 3e-2


LEVELS: dict[str, dict[str, Level | None]] = {
    "AdamW": {"no PC": None, "PC level 4": 4, "over-flattening": "over_flattening"},
    "Muon": {"no PC": None, "PC level 2": 2, "over-flattening": "over_flattening"},
}
"""By optimizer: no PC layer, the paper's choice, and the ablation."""
SLOPE = 20775.0  # at zero, of the composite in appendix J: the product of its first coefficients


class Layer(nn.Module):
    """W, or gamma s g(W / s) with a tracked pair."""

    def __init__(self, start: Tensor, level: Level | None) -> None:
        super().__init__()
        self.level = level
        self.weight, self.gamma = nn.Parameter(start.clone()), nn.Parameter(start.new_ones(1))
        self.u, self.v = start.new_zeros(1, len(start)), start.new_zeros(1, start.shape[1])

    def forward(self) -> Tensor:
        """The effective weight."""
        if self.level is None:
            return self.gamma * self.weight
        pair = top_singular(self.weight.detach()[None], self.u, self.v, steps=16)
        self.u, self.v = pair[1:]
        pc = Preconditioner(level=self.level)
        return self.gamma * pc.effective(self.weight[None], self.u, self.v, 1.0)[0]


def optimizer_of(name: str, layer: Layer, sizes: Sizes) -> torch.optim.Optimizer:
    """AdamW for everything, or Muon for the matrix and AdamW for gamma; no weight decay."""
    scalar: dict[str, Any] = {"params": [layer.gamma], "rule": "adamw", "lr": sizes.adamw}
    if name == "AdamW":
        return AdamW([{"params": [layer.weight], "lr": sizes.adamw}, scalar], weight_decay=0.0)
    return Muon([{"params": [layer.weight], "lr": sizes.muon}, scalar], weight_decay=0.0)


def train(
    name: str, level: Level | None, start: Tensor, target: Tensor, sizes: Sizes
) -> list[float]:
    """Train; |effective W - T|_F^2 / |T|_F^2 before every step, the loss over isotropic inputs."""
    layer = Layer(start, level)
    optimizer = optimizer_of(name, layer, sizes)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=sizes.steps)
    losses = []
    for _ in range(sizes.steps):
        loss = (layer() - target).square().sum() / target.square().sum()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return losses


def run(sizes: Sizes, seed: int) -> Outcome:
    """Train all variants from the same start to the same target, and check the composite."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(gaussian(generator, sizes.side, sizes.side))[0] for _ in range(2)
    )
    values = 1 / torch.arange(1, sizes.side + 1, dtype=torch.float64)
    target = left * values @ right
    start = gaussian(generator, sizes.side, sizes.side) / (2 * sizes.side**0.5)
    floor = 1 - float(nuclear_rank(target)) / sizes.side
    losses = {
        name: {
            variant: train(name, level, start, target, sizes) for variant, level in levels.items()
        }
        for name, levels in LEVELS.items()
    }
    x = torch.logspace(-3, 0, 400, dtype=torch.float64)
    tiny = torch.tensor(1e-12, dtype=torch.float64)
    flat = float((evaluate(x, "over_flattening") - 1).abs().max())
    slope = float(evaluate(tiny, "over_flattening") / tiny)
    checks = [
        at_most("composite: largest |g - 1| on [1e-3, 1]", flat, 1e-3, "paper, figure 12"),
        near("composite: slope at zero", slope, SLOPE, 1e-3, "paper, appendix J"),
    ]
    for name, by_variant in losses.items():
        plain, pc, flattened = (each[-1] for each in by_variant.values())
        checks += [
            at_least(f"{name}: last loss, over-flattening / no PC", flattened / plain, 1, "theory"),
            at_least(f"{name}: last loss, over-flattening / PC", flattened / pc, 1, "theory"),
            at_least(f"{name}: last loss of over-flattening / 1 - nr(T) / n", flattened / floor,
                     0.9, "theory: best orthogonal fit"),
        ]  # fmt: skip
    return Outcome(checks, {"losses": losses, "floor": floor, "x": x.tolist()})


def draw(data: Data) -> Figure:
    """Draw the loss of every variant under each optimizer."""
    figure, axes = new_figure(2)
    for axis, (name, by_variant) in zip(axes, data["losses"].items(), strict=True):
        axis.axhline(data["floor"], color="0.3", linestyle=":", label="best orthogonal fit")
        draw_lines(
            axis, by_variant, yscale="log", xlabel="step", ylabel="relative loss", title=name
        )
    return figure


EXPERIMENT = Experiment(__name__, __doc__, run, draw, Sizes(), Sizes(12, 60, 4e-2, 1e-1))
