"""Sparse regression with a bias-free network of four layers and Euclidean or spectral steps.

x is standard normal, y = x_1 x_2 x_3, and the loss is the mean squared error over the whole batch.
For a layer with input A and gradient G, a Euclidean step is lr n / |A|_2^2 G, and a spectral step
is lr n / |A|_F^2 |G|_* polar(G).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.experiments.experiment import Check, Draws, at_most
from spectral import SpectralDescent
from spectral.measures import nuclear_rank, stable_rank
from spectral.singular_triplets import top_singular

Activation = Literal["relu^2", "swiglu"]
HIDDEN = (1, 2)
"""Layers with spectral steps in "SpecGD": all layers except the first and the last."""
STEP_ERROR = 1e-3
RESOLVED = 1e-2
"""msign must map singular values of a gradient to 1 if they exceed this fraction of the largest;
smaller singular values would need more msign steps."""


def activate(kind: Activation, x: Tensor) -> Tensor:
    """Return relu(x)^2, or SiLU(gate) * up of the halves of `x` `[n, 2 hidden]`."""
    if kind == "relu^2":
        return x.relu().square()
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def initial(draws: Draws, inputs: int, hidden: int, kind: Activation) -> list[Tensor]:
    """Return the weights of inputs -> hidden -> hidden -> hidden -> 1 with torch's default
    initialization."""
    rows = hidden if kind == "relu^2" else 2 * hidden
    shapes = [(rows, inputs), (rows, hidden), (rows, hidden), (1, hidden)]
    empty = [torch.empty(shape, dtype=torch.float64) for shape in shapes]
    return [nn.init.kaiming_uniform_(w, 5**0.5, generator=draws.generator) for w in empty]


def activations(weights: Sequence[Tensor], x: Tensor, kind: Activation) -> list[Tensor]:
    """Return the inputs `[n, width]` of all layers, starting with `x`."""
    outputs = [x]
    for weight in weights[:-1]:
        outputs.append(activate(kind, outputs[-1] @ weight.mT))
    return outputs


@dataclass(frozen=True)
class Problem:
    """Data x `[n, inputs]`, y `[n, 1]`, and the network to fit them."""

    x: Tensor
    y: Tensor
    weights: list[Tensor]
    kind: Activation

    @classmethod
    def drawn(
        cls, draws: Draws, samples: int, inputs: int, hidden: int, kind: Activation
    ) -> "Problem":
        """Draw data, then the weights."""
        x = draws.normal(samples, inputs)
        weights = initial(draws, inputs, hidden, kind)
        return cls(x, x[:, :3].prod(1, keepdim=True), weights, kind)

    def loss(self, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the loss `[]` and the inputs of all layers."""
        inputs = activations(weights, self.x, self.kind)
        return (inputs[-1] @ weights[-1].mT - self.y).square().mean(), inputs


@dataclass
class Training:
    """The loss before every step, and ranks of all layers by step.

    stable   stable rank of each layer's input
    nuclear  nuclear rank of each layer's gradient
    """

    losses: list[float] = field(default_factory=list)
    stable: dict[int, list[float]] = field(default_factory=dict)
    nuclear: dict[int, list[float]] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """Return the run's data for recorded.yaml."""
        return {"loss": self.losses, "stable_rank": self.stable, "nuclear_rank": self.nuclear}

    def drift(self) -> float:
        """Return the largest relative change of the stable rank of a hidden layer's input."""
        first = self.stable[0]
        return max(abs(ranks[i] / first[i] - 1) for ranks in self.stable.values() for i in HIDDEN)


@dataclass(frozen=True)
class Method:
    """A method: whether hidden layers take spectral steps, the step size, and the msign steps."""

    spectral: bool
    lr: float
    polar_steps: int


class BlockDescent:
    """Optimizer with Euclidean and spectral steps, whose scales n / |A|^2 are computed at each
    step."""

    def __init__(self, weights: Sequence[nn.Parameter], method: Method) -> None:
        self.lr = method.lr
        self.hidden = HIDDEN if method.spectral else ()
        self.vectors: dict[int, tuple[Tensor, Tensor]] = {}
        self.optimizers: list[torch.optim.Optimizer] = [
            SpectralDescent([w], weight_decay=0.0, steps=method.polar_steps)
            if layer in self.hidden
            else torch.optim.SGD([w])
            for layer, w in enumerate(weights)
        ]

    def step(self, inputs: Sequence[Tensor]) -> None:
        """Update all weights with their gradients."""
        for layer, (optimizer, a) in enumerate(zip(self.optimizers, inputs, strict=True)):
            optimizer.param_groups[0]["lr"] = self.lr * self.scale(layer, a.detach())
            optimizer.step()

    def scale(self, layer: int, a: Tensor) -> float:
        """Return n / |A|_2^2, or n / |A|_F^2 for a spectral layer."""
        if layer in self.hidden:
            return a.shape[0] / float(a.square().sum())
        u, v = self.vectors.get(layer, (a.new_zeros(1, a.shape[0]), a.new_zeros(1, a.shape[1])))
        steps = 12 if layer in self.vectors else 64
        norm, u, v = top_singular(a[None], u, v, steps=steps)
        self.vectors[layer] = u, v
        return a.shape[0] / float(norm) ** 2


def train(problem: Problem, method: Method, *, steps: int, interval: int) -> Training:
    """Train for `steps` steps with a method; compute ranks every `interval` steps."""
    weights = [nn.Parameter(w.clone()) for w in problem.weights]
    optimizer, run = BlockDescent(weights, method), Training()
    for step in range(steps):
        loss, inputs = problem.loss(weights)
        gradients = torch.autograd.grad(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        run.losses.append(loss.item())
        if step % interval == 0:
            run.stable[step] = [float(stable_rank(a.detach())) for a in inputs]
            run.nuclear[step] = [float(nuclear_rank(gradient)) for gradient in gradients]
        optimizer.step(inputs)
    return run


def first_step(problem: Problem, method: Method) -> list[Check]:
    """Check the first step of each layer against SVDs of its input and gradient."""
    weights = [nn.Parameter(w.clone()) for w in problem.weights]
    loss, inputs = problem.loss(weights)
    loss.backward()
    BlockDescent(weights, method).step(inputs)
    checks = []
    for layer, (w, old, a) in enumerate(zip(weights, problem.weights, inputs, strict=True)):
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
