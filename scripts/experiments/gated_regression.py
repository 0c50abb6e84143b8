"""Figure 20 of the criterion paper: on a SwiGLU network spectral steps help at a small batch and
not at a large one."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from scripts.experiments.check import Check, at_least, at_most
from scripts.experiments.experiment import Data, Experiment, Outcome
from scripts.experiments.networks import Method, Problem, Training, first_step, train
from scripts.plots.style import draw_lines, new_figure


@dataclass(frozen=True)
class Sizes:
    """Batches and the steps of each; inputs, width, ranks every `interval` steps, msign steps.

    The paper takes 400 and 280 steps; the first ones, in which the methods diverge, are enough.
    """

    batches: tuple[int, int] = (512, 8196)
    steps: tuple[int, int] = (101, 41)
    inputs: int = 128
    hidden: int = 512
    interval: int = 20
    polar_steps: int = 20


RATES = {"small": {"gd": 0.01, "spectral": 0.025}, "large": {"gd": 0.0035, "spectral": 0.0015}}


def run(sizes: Sizes, seed: int) -> Outcome:
    """Run both methods at both batches."""
    runs: dict[str, dict[str, Training]] = {name: {} for name in RATES}
    first = []
    for (name, rates), batch, steps in zip(RATES.items(), sizes.batches, sizes.steps, strict=True):
        size = (batch, sizes.inputs, sizes.hidden)
        for key, rate in rates.items():
            method = Method(key == "spectral", rate, sizes.polar_steps)
            problem = Problem.drawn(seed, *size, "swiglu")
            runs[name][key] = train(problem, method, steps=steps, interval=sizes.interval)
            if name == "small":
                first += first_step(Problem.drawn(seed, *size, "swiglu"), method)
    data: Data = {
        name: {key: run.data() for key, run in methods.items()} for name, methods in runs.items()
    }
    drift = max(run.drift() for run in runs["small"].values())
    more = {"batches": list(sizes.batches), "drift": drift}
    return Outcome(properties(runs) + first, data | more)


def properties(runs: dict[str, dict[str, Training]]) -> list[Check]:
    """Check the paper's statements about the two batches."""
    small, large = runs["small"], runs["large"]
    early = len(small["gd"].losses) // 5
    lead = small["gd"].losses[early] / small["spectral"].losses[early]
    late = large["gd"].losses[-1] / large["spectral"].losses[-1]
    first = [runs[name]["gd"].stable[0][1] for name in runs]
    return [
        at_least(f"small batch: loss of GD / SpecGD, step {early}", lead, 1, "paper"),
        at_most("large batch: the same at the end, over the small batch's", late / lead, 1,
                "paper: the lead is lost"),
        at_least("st(A1), large / small batch", first[1] / first[0], 1, "paper"),
    ]  # fmt: skip


def draw(data: Data) -> Figure:
    """Draw the loss of both methods, a panel per batch."""
    figure, axes = new_figure(2)
    for axis, name, batch in zip(axes, RATES, data["batches"], strict=True):
        losses = {
            "gradient descent": data[name]["gd"]["loss"],
            "spectral on W2, W3": data[name]["spectral"]["loss"],
        }
        draw_lines(axis, losses, yscale="log", xlabel="step", ylabel="loss",
                   title=f"SwiGLU network, batch {batch}")  # fmt: skip
    return figure


EXPERIMENT = Experiment(
    __name__, __doc__, run, draw, Sizes(), Sizes((96, 768), (41, 21), 24, 48, 10, 10), seed=42
)
