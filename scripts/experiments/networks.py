"""Sparse regression by a bias-free network of four layers, with Euclidean or spectral layers.

x is standard normal, y = x_1 x_2 x_3, and the loss is the mean squared error over the whole batch.
With A for the input of a layer, its step is lr n / |A|_2^2 G if Euclidean, and
lr n / |A|_F^2 |G|_* polar(G) if spectral.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.experiments.check import Check, at_most
from spectral import SpectralDescent
from spectral.measures import nuclear_rank, stable_rank
from spectral.singular_triplets import top_singular

Activation = Literal["relu^2", "swiglu"]
HIDDEN = (1, 2)
"""The layers with spectral steps in "SpecGD": all but the first and the last."""


def activate(kind: Activation, x: Tensor) -> Tensor:
    """relu(x)^2, or SiLU(gate) * up with both halves of `x` `[n, 2 hidden]`."""
    if kind == "relu^2":
        return x.relu().square()
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


STEP_ERROR = 1e-3
RESOLVED = 1e-2
"""Singular values of a gradient, as a share of the largest, that msign must take to 1; it needs
more steps for smaller ones."""


class Network(nn.Module):
    """inputs -> hidden -> hidden -> hidden -> 1 with torch's default initialisation, float64."""

    def __init__(self, inputs: int, hidden: int, kind: Activation) -> None:
        super().__init__()
        self.kind = kind
        rows = hidden if kind == "relu^2" else 2 * hidden
        widths = [(inputs, rows), (hidden, rows), (hidden, rows), (hidden, 1)]
        self.layers = nn.ModuleList(
            nn.Linear(before, after, bias=False, dtype=torch.float64) for before, after in widths
        )

    def weights(self) -> list[nn.Parameter]:
        """The weights, one per layer."""
        return list(self.parameters())

    def activations(self, x: Tensor) -> list[Tensor]:
        """The input of each layer, `[n, width]`; `x` first."""
        outputs = [x]
        for layer in self.layers[:-1]:
            outputs.append(activate(self.kind, layer(outputs[-1])))
        return outputs


@dataclass(frozen=True)
class Problem:
    """Data x `[n, inputs]`, y `[n, 1]` and the network to fit them."""

    x: Tensor
    y: Tensor
    network: Network

    @classmethod
    def drawn(
        cls, seed: int, samples: int, inputs: int, hidden: int, kind: Activation
    ) -> "Problem":
        """Draw data, then the network, from one seed; torch's generator is unchanged."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            x = torch.randn(samples, inputs, dtype=torch.float64)
            return cls(x, x[:, :3].prod(1, keepdim=True), Network(inputs, hidden, kind))


@dataclass
class Training:
    """The loss before every step, and by step, for each layer, the stable rank of its input and the
    nuclear rank of its gradient."""

    losses: list[float] = field(default_factory=list)
    stable: dict[int, list[float]] = field(default_factory=dict)
    nuclear: dict[int, list[float]] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """What is drawn and recorded of the run."""
        return {"loss": self.losses, "stable_rank": self.stable, "nuclear_rank": self.nuclear}

    def drift(self) -> float:
        """The largest relative change of the stable rank of a hidden layer's input."""
        first = self.stable[0]
        return max(abs(ranks[i] / first[i] - 1) for ranks in self.stable.values() for i in HIDDEN)


@dataclass(frozen=True)
class Method:
    """Steps of size `lr`, on the hidden layers `spectral` ones, with so many steps of msign."""

    spectral: bool
    lr: float
    polar_steps: int


class BlockDescent:
    """Takes both kinds of steps; their scales n / |A|^2 are measured before every step."""

    def __init__(self, weights: Sequence[nn.Parameter], method: Method) -> None:
        self.weights, self.lr = weights, method.lr
        self.spectral = HIDDEN if method.spectral else ()
        self.vectors: dict[int, tuple[Tensor, Tensor]] = {}
        euclidean = [{"params": [w]} for i, w in enumerate(weights) if i not in self.spectral]
        hidden = [{"params": [weights[i]]} for i in self.spectral]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(euclidean, lr=1.0)]
        if hidden:
            self.optimizers.append(
                SpectralDescent(hidden, weight_decay=0.0, steps=method.polar_steps)
            )

    def step(self, activations: Sequence[Tensor]) -> None:
        """Update all weights with their gradients."""
        groups = [group for each in self.optimizers for group in each.param_groups]
        for group in groups:
            layer = next(i for i, w in enumerate(self.weights) if w is group["params"][0])
            group["lr"] = self.lr * self.scale(layer, activations[layer].detach())
        for optimizer in self.optimizers:
            optimizer.step()

    def scale(self, layer: int, a: Tensor) -> float:
        """n / |A|_2^2, or n / |A|_F^2 for a spectral layer."""
        if layer in self.spectral:
            return a.shape[0] / float(a.square().sum())
        u, v = self.vectors.get(layer, (a.new_zeros(1, a.shape[0]), a.new_zeros(1, a.shape[1])))
        steps = 12 if layer in self.vectors else 64
        norm, u, v = top_singular(a[None], u, v, steps=steps)
        self.vectors[layer] = u, v
        return a.shape[0] / float(norm) ** 2


def train(problem: Problem, method: Method, *, steps: int, interval: int) -> Training:
    """Take `steps` steps of one method; ranks are computed every `interval` steps."""
    network = problem.network
    weights = network.weights()
    optimizer = BlockDescent(weights, method)
    run = Training()
    for step in range(steps):
        activations = network.activations(problem.x)
        loss = (network.layers[-1](activations[-1]) - problem.y).square().mean()
        network.zero_grad()
        loss.backward()
        run.losses.append(loss.item())
        if step % interval == 0:
            run.stable[step] = [float(stable_rank(a.detach())) for a in activations]
            run.nuclear[step] = [float(nuclear_rank(w.grad)) for w in weights if w.grad is not None]
        optimizer.step(activations)
    return run


def first_step(problem: Problem, method: Method) -> list[Check]:
    """Check the first step on each layer from SVDs of its input and of its gradient.

    The step is taken on `problem`'s network, which changes.
    """
    network = problem.network
    weights = network.weights()
    activations = network.activations(problem.x)
    ((network.layers[-1](activations[-1]) - problem.y).square().mean()).backward()
    before = [w.detach().clone() for w in weights]
    BlockDescent(weights, method).step(activations)
    checks = []
    for layer, (w, old, a) in enumerate(zip(weights, before, activations, strict=True)):
        assert w.grad is not None
        norms = torch.linalg.svdvals(a.detach())
        if method.spectral and layer in HIDDEN:
            left, values, right = torch.linalg.svd(w.grad, full_matrices=False)
            large = values > RESOLVED * values[0]
            size = values.sum() * method.lr * len(a) / norms.square().sum()
            along = (left.mT @ (old - w.detach()) @ right.mT).diagonal()[large]
            error = float((along / size - 1).abs().max())
        else:
            step = w.grad * method.lr * len(a) / norms[0].square()
            error = float((old - w.detach() - step).norm() / step.norm())
        name = f"{'SpecGD' if method.spectral else 'GD'}: error of the first step on W{layer + 1}"
        checks.append(at_most(name, error, STEP_ERROR, "theory: SVD", "first step"))
    return checks
