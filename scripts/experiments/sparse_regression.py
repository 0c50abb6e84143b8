"""Figures 1 and 4 of the criterion paper: in sparse regression the activations of a relu^2 network
have a low stable rank throughout, and spectral steps on hidden layers reach a much lower loss."""

from scripts.experiments.experiment import Check, Draws, Outcome, Panel, at_least, at_most
from scripts.experiments.networks import Method, Problem, Training, first_step, train

SMALL = {
    "samples": 128, "inputs": 24, "hidden": 64, "steps": 60, "interval": 10, "polar_steps": 10,
    "gd_rate": 0.02, "spectral_rate": 0.02,
}  # fmt: skip


def experiment(
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
    """Train with gradient descent on all layers, then with spectral steps on the two hidden layers;
    compute ranks every `interval` steps."""
    problem = Problem.drawn(draws, samples, inputs, hidden, "relu^2")
    runs, checks = {}, []
    for name, rate in (("gd", gd_rate), ("spectral", spectral_rate)):
        method = Method(name == "spectral", rate, polar_steps)
        runs[name] = train(problem, method, steps=steps, interval=interval)
        checks += first_step(problem, method)
    gd = runs["gd"]
    last = max(gd.nuclear)
    data = {name: run.data() for name, run in runs.items()}
    ratio = {"last_ratio": gd.nuclear[last][2] / gd.stable[last][2]}  # nr(G3) / st(A2)
    return Outcome(properties(runs, steps // 2) + checks, data | ratio, panels(**runs))


def properties(runs: dict[str, Training], middle: int) -> list[Check]:
    """Check the order of the losses, the small change of stable ranks, and the criterion for W2."""
    gd, spec = runs["gd"], runs["spectral"]
    worst = max(run.drift() for run in runs.values())
    ratio = min(
        run.nuclear[step][1] / run.stable[step][1] for run in runs.values() for step in run.nuclear
    )
    return [
        at_least(f"loss of GD / SpecGD, step {middle}", gd.losses[middle] / spec.losses[middle], 1,
                 "paper"),
        at_most("largest relative drift of st(A1), st(A2)", worst, 0.2, "paper: nearly constant"),
        at_least("least nr(G2) / st(A1)", ratio, 1, "paper"),
    ]  # fmt: skip


def panels(gd: Training, spectral: Training) -> list[Panel]:
    """Return panels of losses, stable ranks of activations and nuclear ranks of gradients."""
    losses = {"gradient descent": gd.losses, "spectral on W2, W3 (dashed)": spectral.losses}
    stable = [by_layer(run.stable, "A", 1) for run in (gd, spectral)]
    nuclear = [by_layer(run.nuclear, "G", 0) for run in (gd, spectral)]
    return [
        Panel("relu^2 network: loss", losses, y="loss", log="y"),
        Panel("stable rank of activations", stable[0], stable[1]),
        Panel("nuclear rank of gradients", nuclear[0], nuclear[1], log="y"),
    ]


def by_layer(ranks: dict[int, list[float]], name: str, first: int) -> dict[str, dict[int, float]]:
    """Return the ranks of three layers, starting at layer `first`, by label and step."""
    return {f"{name}{i + 1}": {t: row[i + first] for t, row in ranks.items()} for i in range(3)}
