"""Figures 1 and 4 of the criterion paper: on sparse regression a relu^2 network's activations keep
a low stable rank, and spectral steps on its hidden layers are far ahead."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from scripts.experiments.check import Check, at_least, at_most
from scripts.experiments.experiment import Data, Experiment, Outcome
from scripts.experiments.networks import Method, Problem, Training, first_step, train
from scripts.plots.style import COLORS, draw_lines, new_figure


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


def run(sizes: Sizes, seed: int) -> Outcome:
    """Run gradient descent on all layers, and with spectral steps on the two hidden ones."""
    runs, checks = {}, []
    for name, rate in (("gd", sizes.gd_rate), ("spectral", sizes.spectral_rate)):
        size = (sizes.samples, sizes.inputs, sizes.hidden)
        method = Method(name == "spectral", rate, sizes.polar_steps)
        problem = Problem.drawn(seed, *size, "relu^2")
        runs[name] = train(problem, method, steps=sizes.steps, interval=sizes.interval)
        checks += first_step(Problem.drawn(seed, *size, "relu^2"), method)
    gd = runs["gd"]
    last = max(gd.nuclear)
    data = {name: run.data() for name, run in runs.items()}
    ratio = {"last_ratio": gd.nuclear[last][2] / gd.stable[last][2]}  # nr(G3) / st(A2)
    return Outcome(properties(sizes, runs) + checks, data | ratio)


def properties(sizes: Sizes, runs: dict[str, Training]) -> list[Check]:
    """Check the order of the losses, frozen stable ranks, and the criterion on W2."""
    gd, spec = runs["gd"], runs["spectral"]
    middle = sizes.steps // 2
    worst = max(run.drift() for run in runs.values())
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


def draw(data: Data) -> Figure:
    """Draw the loss, stable ranks of activations and nuclear ranks of gradients."""
    figure, axes = new_figure(3, width=4.2)
    names = {"gradient descent": "gd", "spectral on W2, W3": "spectral"}
    draw_lines(axes[0], {name: data[key]["loss"] for name, key in names.items()},
               yscale="log", xlabel="step", ylabel="loss", title="relu² network: loss")  # fmt: skip
    for axis, ranks, layers, about in (
        (axes[1], "stable_rank", {"A1": 1, "A2": 2, "A3": 3}, "stable rank of activations"),
        (axes[2], "nuclear_rank", {"G1": 0, "G2": 1, "G3": 2}, "nuclear rank of gradients"),
    ):
        for key, style in (("gd", "-"), ("spectral", "--")):
            curves = {
                name if key == "gd" else f"_{name}": {
                    step: row[layer] for step, row in data[key][ranks].items()
                }
                for name, layer in layers.items()
            }  # a name with an underscore is not in the legend
            axis.set_prop_cycle(color=COLORS)
            draw_lines(axis, curves, style, xlabel="step", title=about)
    axes[2].set_yscale("log")
    return figure


EXPERIMENT = Experiment(
    __name__, __doc__, run, draw, Sizes(), Sizes(128, 24, 64, 60, 10, 10, 0.02, 0.02), seed=42
)
