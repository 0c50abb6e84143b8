"""Figure 19 of the criterion paper: the stable rank of SwiGLU activations grows with the batch; the
stable rank of relu^2 activations does not."""

import torch

from scripts.experiments.experiment import Check, Draws, Outcome, Panel, at_least, at_most, near
from scripts.experiments.networks import Activation, Problem, activations, initial
from spectral.measures import stable_rank

SMALL = {"batches": (128, 512, 2048), "inputs": 64, "hidden": 192}
KINDS: tuple[Activation, ...] = ("swiglu", "relu^2")


def experiment(
    draws: Draws,
    *,
    batches: tuple[int, ...] = (128, 256, 512, 1024, 4096, 8196),
    inputs: int = 128,
    hidden: int = 512,
) -> Outcome:
    """Compare st(A1), st(A2) and st(A3) at initialization for both activations; all batch sizes use
    the same network with new data."""
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
        rises = min(b / a for a, b in zip(gated, gated[1:], strict=False))
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
