"""Sparse regression from the criterion paper, using a bias-free four-layer network trained with
Euclidean or spectral steps.

x is standard normal, y = x_1 x_2 x_3, and the loss is the full-batch mean squared error. For a
layer with input A and gradient G, a Euclidean step is lr n / |A|_2^2 G, and a spectral step is
lr n / |A|_F^2 |G|_* polar(G).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.experiments.experiment import Check, Draws, Outcome, Panel, at_least, at_most, near
from spectral import SpectralDescent
from spectral.measures import nuclear_rank, stable_rank
from spectral.singular_triplets import top_singular

Activation = Literal["relu^2", "swiglu"]
HIDDEN = (1, 2)
"""Layers that take spectral steps in "SpecGD": all but the first and the last."""
STEP_ERROR = 1e-3
RESOLVED = 1e-2
"""msign must map a gradient's singular values to 1 if they exceed this fraction of the largest one.
Mapping smaller singular values to 1 would require more msign steps."""
KINDS: tuple[Activation, ...] = ("swiglu", "relu^2")
GATED_RATES = {
    "small": {"gd": 0.01, "spectral": 0.025},
    "large": {"gd": 0.0035, "spectral": 0.0015},
}


def activate(kind: Activation, x: Tensor) -> Tensor:
    """Return relu(x)^2 or, for "swiglu", SiLU(gate) * up. Here, gate and up are the two halves of
    `x` `[n, 2 hidden]`."""
    if kind == "relu^2":
        return x.relu().square()
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def initial(draws: Draws, inputs: int, hidden: int, kind: Activation) -> list[Tensor]:
    """Return the weights of an inputs -> hidden -> hidden -> hidden -> 1 network, with torch's
    default initialization."""
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
        """Draw the data, then the weights."""
        x = draws.normal(samples, inputs)
        weights = initial(draws, inputs, hidden, kind)
        return cls(x, x[:, :3].prod(1, keepdim=True), weights, kind)

    def loss(self, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, as a 0-d tensor, and the inputs of all layers."""
        inputs = activations(weights, self.x, self.kind)
        return (inputs[-1] @ weights[-1].mT - self.y).square().mean(), inputs


@dataclass
class Training:
    """The loss before every step, and per-layer ranks by step.

    stable   stable rank of each layer's input
    nuclear  nuclear rank of each layer's gradient
    """

    losses: list[float] = field(default_factory=list)
    stable: dict[int, list[float]] = field(default_factory=dict)
    nuclear: dict[int, list[float]] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """Return the data to compare with recorded.yaml."""
        return {"loss": self.losses, "stable_rank": self.stable, "nuclear_rank": self.nuclear}

    def drift(self) -> float:
        """Return the largest relative change in the stable rank of any hidden layer's input."""
        first = self.stable[0]
        return max(abs(ranks[i] / first[i] - 1) for ranks in self.stable.values() for i in HIDDEN)


@dataclass(frozen=True)
class Method:
    """Settings of a method: whether hidden layers take spectral steps, the step size, and the
    number of msign steps."""

    spectral: bool
    lr: float
    polar_steps: int


class BlockDescent:
    """Optimizer that takes Euclidean and spectral steps, recomputing the scales n / |A|^2 at every
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
        """Update all weights from their gradients."""
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
    """Train for `steps` steps, computing ranks every `interval` steps.

    Raises FloatingPointError if training diverges.
    """
    weights = [nn.Parameter(w.clone()) for w in problem.weights]
    optimizer, run = BlockDescent(weights, method), Training()
    for step in range(steps):
        loss, inputs = problem.loss(weights)
        gradients = torch.autograd.grad(loss, weights)
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"the loss must be finite, got {loss.item()} at step {step}")
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        run.losses.append(loss.item())
        if step % interval == 0:
            run.stable[step] = [float(stable_rank(a.detach())) for a in inputs]
            run.nuclear[step] = [float(nuclear_rank(gradient)) for gradient in gradients]
        optimizer.step(inputs)
    return run


def first_step(problem: Problem, method: Method) -> list[Check]:
    """Check each layer's first step against SVDs of the layer's input and gradient."""
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


def sparse_regression(
    draws: Draws,
    *,
    samples: int = 512,
    inputs: int = 128,
    hidden: int = 512,
    steps: int = 400,
    interval: int = 40,
    polar_steps: int = 20,
    gd_rate: float = 0.081,
    spectral_rate: float = 0.1,
) -> Outcome:
    """Figures 1 and 4 of the criterion paper: in sparse regression, the activations of a relu^2
    network have a low stable rank throughout training. Spectral steps on hidden layers reach a much
    lower loss.

    The network is trained once with gradient descent on all layers, and once with spectral steps on
    the two hidden layers. Ranks are computed every `interval` steps.
    """
    problem = Problem.drawn(draws, samples, inputs, hidden, "relu^2")
    runs, checks = {}, []
    for name, rate in (("gd", gd_rate), ("spectral", spectral_rate)):
        method = Method(name == "spectral", rate, polar_steps)
        runs[name] = train(problem, method, steps=steps, interval=interval)
        checks += first_step(problem, method)
    gd, middle = runs["gd"], steps // 2
    lead = gd.losses[middle] / runs["spectral"].losses[middle]
    drift = max(run.drift() for run in runs.values())
    ratio = min(
        run.nuclear[step][1] / run.stable[step][1] for run in runs.values() for step in run.nuclear
    )
    checks = [
        at_least(f"loss of GD / SpecGD, step {middle}", lead, 1, "paper"),
        at_most("largest relative drift of st(A1), st(A2)", drift, 0.2, "paper: nearly constant"),
        at_least("least nr(G2) / st(A1)", ratio, 1, "paper"),
        *checks,
    ]
    last = max(gd.nuclear)
    last_ratio = gd.nuclear[last][2] / gd.stable[last][2]  # nr(G3) / st(A2)
    data = {name: run.data() for name, run in runs.items()} | {"last_ratio": last_ratio}
    return Outcome(checks, data, panels(**runs))


def panels(gd: Training, spectral: Training) -> list[Panel]:
    """Return panels of the losses, activation stable ranks and gradient nuclear ranks."""
    losses = {"gradient descent": gd.losses, "spectral on W2, W3 (dashed)": spectral.losses}
    stable = [by_layer(run.stable, "A", 1) for run in (gd, spectral)]
    nuclear = [by_layer(run.nuclear, "G", 0) for run in (gd, spectral)]
    return [
        Panel("relu^2 network: loss", losses, y="loss", log="y"),
        Panel("stable rank of activations", stable[0], stable[1]),
        Panel("nuclear rank of gradients", nuclear[0], nuclear[1], log="y"),
    ]


def by_layer(ranks: dict[int, list[float]], name: str, first: int) -> dict[str, dict[int, float]]:
    """Return the ranks of three consecutive layers, starting with layer `first`, keyed by label and
    step."""
    return {f"{name}{i + 1}": {t: row[i + first] for t, row in ranks.items()} for i in range(3)}


def gated_batches(
    draws: Draws,
    *,
    batches: tuple[int, ...] = (128, 256, 512, 1024, 4096, 8196),
    inputs: int = 128,
    hidden: int = 512,
) -> Outcome:
    """Figure 19 of the criterion paper: the stable rank of SwiGLU activations grows with the batch
    size, and the stable rank of relu^2 activations does not.

    The experiment compares the stable ranks st(A1), st(A2) and st(A3) at initialization. All batch
    sizes use the same network with fresh data.
    """
    ranks: dict[str, dict[int, list[float]]] = {kind: {} for kind in KINDS}
    for kind in KINDS:
        network = draws.restarted()
        weights = initial(network, inputs, hidden, kind)
        for batch in batches:
            outputs = activations(weights, network.normal(batch, inputs), kind)[1:]
            ranks[kind][batch] = [float(stable_rank(a)) for a in outputs]
    checks = []
    for layer in range(3):
        gated, plain = ([row[layer] for row in ranks[kind].values()] for kind in KINDS)
        rises = min(b / a for a, b in pairwise(gated))
        checks += [
            at_least(f"SwiGLU, A{layer + 1}: least growth from batch to batch", rises, 1, "paper"),
            at_most(f"A{layer + 1}: growth of relu^2 over all batches / that of SwiGLU",
                    plain[-1] / plain[0] / (gated[-1] / gated[0]), 0.7, "paper: flat"),
        ]  # fmt: skip
    for kind in KINDS:
        checks += definitions(Problem.drawn(draws.restarted(), batches[0], inputs, hidden, kind))
    lines = [
        {f"{kind}, A{i + 1}": {b: row[i] for b, row in ranks[kind].items()} for i in range(3)}
        for kind in KINDS
    ]
    panel = Panel("at initialization", lines[0], lines[1], x="batch", y="stable rank", log="xy")
    return Outcome(checks, {"stable_rank": ranks}, [panel])


def definitions(problem: Problem) -> list[Check]:
    """Check activations and stable ranks against their definitions."""
    checks, x = [], problem.x
    outputs = activations(problem.weights, x, problem.kind)[1:]
    for layer, (weight, a) in enumerate(zip(problem.weights, outputs, strict=False), 1):
        y = x @ weight.mT
        if problem.kind == "swiglu":
            gate, up = y.chunk(2, dim=1)
            x = gate / (1 + (-gate).exp()) * up
        else:
            x = torch.where(y > 0, y * y, 0)
        values = torch.linalg.svdvals(x)
        expected = float((values / values[0]).square().sum())
        error = float((a - x).norm() / x.norm())
        name = f"{problem.kind}, A{layer}"
        checks += [
            at_most(f"{name}: error of the activations", error, 1e-9, "theory: definition",
                    "activations"),
            near(f"{name}: st against an SVD", float(stable_rank(a)), expected, 1e-9,
                 "theory: SVD", "by SVD"),
        ]  # fmt: skip
    return checks


def gated_regression(
    draws: Draws,
    *,
    batches: tuple[int, int] = (512, 8196),
    steps: tuple[int, int] = (101, 41),
    inputs: int = 128,
    hidden: int = 512,
    interval: int = 20,
    polar_steps: int = 20,
) -> Outcome:
    """Figure 20 of the criterion paper: on a SwiGLU network, spectral steps help at a small batch
    size, but not at a large one.

    The paper trains for 400 steps at the small batch size and 280 steps at the large batch size.
    Fewer steps suffice here, because the losses separate early.
    """
    runs: dict[str, dict[str, Training]] = {name: {} for name in GATED_RATES}
    first = []
    for (name, rates), batch, length in zip(GATED_RATES.items(), batches, steps, strict=True):
        problem = Problem.drawn(draws.restarted(), batch, inputs, hidden, "swiglu")
        for key, rate in rates.items():
            method = Method(key == "spectral", rate, polar_steps)
            runs[name][key] = train(problem, method, steps=length, interval=interval)
            if name == "small":
                first += first_step(problem, method)
    panels = [
        Panel(f"SwiGLU network, batch {batch}",
              {"gradient descent": methods["gd"].losses,
               "spectral on W2, W3": methods["spectral"].losses}, y="loss", log="y")
        for batch, methods in zip(batches, runs.values(), strict=True)
    ]  # fmt: skip
    small, large = runs["small"], runs["large"]
    early = len(small["gd"].losses) // 5
    lead = small["gd"].losses[early] / small["spectral"].losses[early]
    late = large["gd"].losses[-1] / large["spectral"].losses[-1]
    growth = large["gd"].stable[0][1] / small["gd"].stable[0][1]
    checks = [
        at_least(f"small batch: loss of GD / SpecGD, step {early}", lead, 1, "paper"),
        at_most("large batch: the same at the end, over the small batch's", late / lead, 1,
                "paper: the lead is lost"),
        at_least("st(A1), large / small batch", growth, 1, "paper"),
    ]  # fmt: skip
    drift = max(run.drift() for run in small.values())
    data = {name: {key: run.data() for key, run in each.items()} for name, each in runs.items()}
    return Outcome(checks + first, {**data, "drift": drift}, panels)
