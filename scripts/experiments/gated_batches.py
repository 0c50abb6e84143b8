"""Figure 19 of the criterion paper: the stable rank of SwiGLU activations grows with the batch,
that of relu^2 does not."""

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

from scripts.experiments.check import Check, at_least, at_most, equal
from scripts.experiments.experiment import Data, Experiment, Outcome
from scripts.experiments.networks import Activation, Network, Problem
from scripts.plots.style import COLORS, draw_lines, new_figure, tick
from spectral.measures import stable_rank


@dataclass(frozen=True)
class Sizes:
    """Batch sizes, inputs and width of the network."""

    batches: tuple[int, ...] = (128, 256, 512, 1024, 4096, 8196)
    inputs: int = 128
    hidden: int = 512


KINDS: tuple[Activation, ...] = ("swiglu", "relu^2")


def stable_ranks(sizes: Sizes, seed: int, kind: Activation) -> dict[int, list[float]]:
    """Stable ranks of A1, A2, A3 by batch: one network, new data for each batch."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        network = Network(sizes.inputs, sizes.hidden, kind)
        ranks = {}
        for batch in sizes.batches:
            x = torch.randn(batch, sizes.inputs, dtype=torch.float64)
            ranks[batch] = [float(stable_rank(a)) for a in network.activations(x)[1:]]
    return ranks


def by_definition(sizes: Sizes, seed: int) -> list[Check]:
    """Check activations and their stable ranks at the smallest batch against their definitions."""
    checks = []
    for kind in KINDS:
        problem = Problem.drawn(seed, sizes.batches[0], sizes.inputs, sizes.hidden, kind)
        x = problem.x
        with torch.no_grad():
            outputs = problem.network.activations(x)[1:]
            for layer, (weight, a) in enumerate(
                zip(problem.network.weights(), outputs, strict=False), 1
            ):
                y = x @ weight.mT
                if kind == "swiglu":
                    gate, up = y[:, : sizes.hidden], y[:, sizes.hidden :]
                    x = gate / (1 + (-gate).exp()) * up
                else:
                    x = torch.where(y > 0, y * y, 0)
                values = torch.linalg.svdvals(x)
                expected = float((values / values[0]).square().sum())
                error = float((a - x).norm() / x.norm())
                name = f"{kind}, A{layer}"
                checks += [
                    at_most(f"{name}: error of the activations", error, 1e-9, "theory: definition",
                            "activations"),
                    equal(f"{name}: st against an SVD", float(stable_rank(a)), expected),
                ]  # fmt: skip
    return checks


def run(sizes: Sizes, seed: int) -> Outcome:
    """Compare stable ranks at initialisation for both activations."""
    ranks = {kind: stable_ranks(sizes, seed, kind) for kind in KINDS}
    checks = []
    for layer in range(3):
        gated, plain = ([row[layer] for row in ranks[kind].values()] for kind in KINDS)
        rises = min(b / a for a, b in zip(gated, gated[1:], strict=False))
        checks += [
            at_least(f"SwiGLU, A{layer + 1}: least growth from batch to batch", rises, 1, "paper"),
            at_most(f"A{layer + 1}: growth of relu^2 over all batches / that of SwiGLU",
                    plain[-1] / plain[0] / (gated[-1] / gated[0]), 0.7, "paper: flat"),
        ]  # fmt: skip
    checks += by_definition(sizes, seed)
    return Outcome(checks, {"stable_rank": ranks})


def draw(data: Data) -> Figure:
    """Draw the stable rank of every layer against the batch."""
    figure, (axes,) = new_figure(width=6.0)
    for kind, style in zip(KINDS, ("o-", "s--"), strict=True):
        ranks = data["stable_rank"][kind]
        curves = {
            f"{kind}, A{layer + 1}".replace("^2", "²"): {b: row[layer] for b, row in ranks.items()}
            for layer in range(3)
        }
        axes.set_prop_cycle(color=COLORS)
        draw_lines(axes, curves, style, xscale="log", yscale="log", xlabel="batch",
                   ylabel="stable rank", title="at initialisation")  # fmt: skip
    tick(axes, [*ranks])
    return figure


EXPERIMENT = Experiment(
    __name__, __doc__, run, draw, Sizes(), Sizes((128, 512, 2048), 64, 192), seed=42
)
