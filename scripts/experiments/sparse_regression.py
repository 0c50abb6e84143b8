"""Figures 1 and 4 of the criterion paper: on sparse regression a relu^2 network's activations keep
a low stable rank, and spectral steps on its hidden layers are far ahead."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from scripts.experiments.check import Check, at_least, at_most, printed
from scripts.experiments.experiment import Data, Experiment, Outcome
from scripts.experiments.networks import Problem, Training, first_step, train
from scripts.plots.style import COLORS, new_figure


@dataclass(frozen=True)
class Sizes:
    """Samples, inputs, width, steps, ranks every `interval` steps, msign steps."""

    samples: int = 512
    inputs: int = 128
    hidden: int = 512
    steps: int = 400
    interval: int = 40
    polar_steps: int = 20
    gd_rate: float = 0.081
    spectral_rate: float = 0.1


# At seed 42, by steps done, in float64 with exact decompositions.
LOSSES = {
    "gd": {0: ".748", 10: ".739", 20: ".725", 40: ".493", 80: ".302", 100: ".213", 200: ".0405",
           399: "5.2e-3"},
    "spectral": {0: ".748", 10: ".730", 20: ".595", 40: ".0593", 80: "9.2e-4", 100: "2.0e-4",
                 200: "2.7e-6", 399: "1.6e-6"},
}  # fmt: skip
STABLE = ("56.7", "5.82", "3.83", "2.93")
NUCLEAR = ("56", "63.0", "34.5")


def run(sizes: Sizes, seed: int, published: bool) -> Outcome:
    """Run gradient descent on all layers, and with spectral steps on the two hidden ones."""
    runs = {}
    for name, rate in (("gd", sizes.gd_rate), ("spectral", sizes.spectral_rate)):
        problem = Problem.drawn(seed, sizes.samples, sizes.inputs, sizes.hidden, "relu^2")
        runs[name] = train(
            problem, spectral=name == "spectral", lr=rate, steps=sizes.steps,
            ranks_at=lambda step: step % sizes.interval == 0, polar_steps=sizes.polar_steps,
        )  # fmt: skip
    checks = properties(sizes, runs)
    for name, rate in (("gd", sizes.gd_rate), ("spectral", sizes.spectral_rate)):
        problem = Problem.drawn(seed, sizes.samples, sizes.inputs, sizes.hidden, "relu^2")
        checks += first_step(
            problem, spectral=name == "spectral", lr=rate, polar_steps=sizes.polar_steps
        )
    if published:
        checks += references(runs)
    data: Data = {
        name: {"loss": each.losses, "stable_rank": each.stable, "nuclear_rank": each.nuclear}
        for name, each in runs.items()
    }
    return Outcome(checks, data)


def drift(training: Training, layer: int) -> float:
    """The largest relative change of the stable rank of a layer's input."""
    ranks = [values[layer] for values in training.stable.values()]
    return max(abs(rank / ranks[0] - 1) for rank in ranks)


def properties(sizes: Sizes, runs: dict[str, Training]) -> list[Check]:
    """Check the order of the losses, frozen stable ranks, and the criterion on W2."""
    gd, spec = runs["gd"], runs["spectral"]
    middle = sizes.steps // 2
    worst = max(drift(each, layer) for each in runs.values() for layer in (1, 2))
    ratio = min(
        each.nuclear[step][1] / each.stable[step][1]
        for each in runs.values()
        for step in each.nuclear
    )
    return [
        at_least(f"loss of GD / SpecGD, step {middle}", gd.losses[middle] / spec.losses[middle], 1,
                 "paper"),
        at_most("largest relative drift of st(A1), st(A2)", worst, 0.2, "paper: nearly constant"),
        at_least("least nr(G2) / st(A1)", ratio, 1, "paper"),
    ]  # fmt: skip


def references(runs: dict[str, Training]) -> list[Check]:
    """Compare losses, and ranks at initialisation, with the reference."""
    names = {"gd": "loss of GD", "spectral": "loss of SpecGD"}
    checks = [
        printed(f"{names[key]}, step {step}", runs[key].losses[step], expected, "recorded",
                names[key])
        for key, table in LOSSES.items()
        for step, expected in table.items()
    ]  # fmt: skip
    first = runs["gd"]
    for layer, expected in enumerate(STABLE):
        checks.append(printed(f"st(A{layer}) at first", first.stable[0][layer], expected,
                              "recorded", "st at first"))  # fmt: skip
    for layer, expected in enumerate(NUCLEAR):
        checks.append(printed(f"nr(G{layer + 1}) at first", first.nuclear[0][layer], expected,
                              "recorded", "nr at first"))  # fmt: skip
    last = max(first.nuclear)
    final = first.nuclear[last][2] / first.stable[last][2]
    return [*checks, at_most("GD: nr(G3) / st(A2) at the end", final, 1, "recorded")]


def draw(data: Data, title: str = "relu² network") -> Figure:
    """Draw the loss, stable ranks of activations and nuclear ranks of gradients."""
    figure, axes = new_figure(3, width=4.2)
    names = {"gd": "gradient descent", "spectral": "spectral on W2, W3"}
    for key, style in (("gd", "-"), ("spectral", "--")):
        axes[0].plot(data[key]["loss"], style, color="0.15", label=names[key])
        for axis, ranks, layers, letter in (
            (axes[1], "stable_rank", (1, 2, 3), "A"),
            (axes[2], "nuclear_rank", (0, 1, 2), "G"),
        ):
            series = data[key][ranks]
            steps = [int(step) for step in series]
            for color, layer in zip(COLORS, layers, strict=False):
                label = f"{letter}{layer + (letter == 'G')}" if key == "gd" else None
                values = [each[layer] for each in series.values()]
                axis.plot(steps, values, style, color=color, label=label)
    axes[0].set(yscale="log", xlabel="step", ylabel="loss", title=f"{title}: loss")
    axes[1].set(xlabel="step", title="stable rank of activations")
    axes[2].set(xlabel="step", yscale="log", title="nuclear rank of gradients")
    axes[0].legend(fontsize=8)
    axes[1].legend(fontsize=8, loc=(0.75, 0.68))  # between the curves
    axes[2].legend(fontsize=8)
    return figure


EXPERIMENT = Experiment(
    "sparse_regression",
    "spectral steps on the hidden layers of a relu^2 network are far ahead",
    "Davis and Drusvyatskiy, figures 1 and 4",
    42,
    Sizes(),
    Sizes(128, 24, 64, 60, 10, 10, 0.02, 0.02),
    run,
    draw,
)
