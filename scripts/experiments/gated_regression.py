"""Figure 20 of the criterion paper: on a SwiGLU network spectral steps help at a small batch and
not at a large one."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from scripts.experiments.check import Check, at_least, at_most, printed
from scripts.experiments.experiment import Data, Experiment, Outcome
from scripts.experiments.networks import Problem, Training, first_step, train
from scripts.experiments.sparse_regression import drift
from scripts.plots.style import COLORS, new_figure


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
# At seed 42, by steps done, in float64 with exact decompositions.
LOSSES = {
    "small": {
        "gd": {0: ".748", 10: ".623", 20: ".177", 40: ".0246", 100: "1.7e-3"},
        "spectral": {0: ".748", 10: ".0762", 20: "5.3e-4", 40: "1.5e-5", 100: "1.1e-7"},
    },
    "large": {
        "gd": {0: "1.072", 40: ".467"},
        "spectral": {0: "1.072", 20: "1.062", 40: ".940"},
    },
}
STABLE = {"small": {1: "87.8"}, "large": {0: "101.3", 1: "110.7", 2: "220.6", 3: "90.0"}}
NUCLEAR = {"small": {1: "98"}, "large": {0: "97", 1: "252", 2: "186.5"}}


def run(sizes: Sizes, seed: int, published: bool) -> Outcome:
    """Run both methods at both batches."""
    runs: dict[str, dict[str, Training]] = {}
    for (name, rates), batch, steps in zip(RATES.items(), sizes.batches, sizes.steps, strict=True):
        runs[name] = {
            method: train(
                Problem.drawn(seed, batch, sizes.inputs, sizes.hidden, "swiglu"),
                spectral=method == "spectral", lr=rate, steps=steps,
                ranks_at=lambda step: step % sizes.interval == 0, polar_steps=sizes.polar_steps,
            )
            for method, rate in rates.items()
        }  # fmt: skip
    checks = properties(runs)
    for method, rate in RATES["small"].items():
        problem = Problem.drawn(seed, sizes.batches[0], sizes.inputs, sizes.hidden, "swiglu")
        checks += first_step(
            problem, spectral=method == "spectral", lr=rate, polar_steps=sizes.polar_steps
        )
    if published:
        checks += references(runs)
    data: Data = {
        name: {
            method: {"loss": each.losses, "stable_rank": each.stable, "nuclear_rank": each.nuclear}
            for method, each in methods.items()
        }
        for name, methods in runs.items()
    }
    return Outcome(checks, {"batches": list(sizes.batches)} | data)


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


def references(runs: dict[str, dict[str, Training]]) -> list[Check]:
    """Compare losses, and ranks at initialisation, with the reference."""
    drifts = [drift(each, layer) for each in runs["small"].values() for layer in (1, 2)]
    frozen = "small batch: largest drift of st(A1) and st(A2)"
    checks = [at_most(frozen, max(drifts), 0.15, "paper: close to their first values")]
    for name, methods in LOSSES.items():
        for method, table in methods.items():
            label = f"{name} batch, {'SpecGD' if method == 'spectral' else 'GD'}"
            for step, expected in table.items():
                found = runs[name][method].losses[step]
                checks.append(printed(f"{label}: loss, step {step}", found, expected, "recorded",
                                      f"{label}: loss"))  # fmt: skip
        start = runs[name]["gd"]
        for layer, expected in STABLE[name].items():
            checks.append(printed(f"{name} batch: st(A{layer}) at first", start.stable[0][layer],
                                  expected, "recorded", f"{name} batch: st"))  # fmt: skip
        for layer, expected in NUCLEAR[name].items():
            checks.append(printed(f"{name} batch: nr(G{layer + 1}) at first",
                                  start.nuclear[0][layer], expected, "recorded",
                                  f"{name} batch: nr"))  # fmt: skip
    return checks


def draw(data: Data) -> Figure:
    """Draw the loss of both methods, a panel per batch."""
    figure, axes = new_figure(2)
    for axis, name, batch in zip(axes, RATES, data["batches"], strict=True):
        for method, label, color in (
            ("gd", "gradient descent", COLORS[0]),
            ("spectral", "spectral on W2, W3", COLORS[1]),
        ):
            axis.plot(data[name][method]["loss"], color=color, label=label)
        axis.set(yscale="log", xlabel="step", ylabel="loss", title=f"SwiGLU network, batch {batch}")
        axis.legend(fontsize=8)
    return figure


EXPERIMENT = Experiment(
    "gated_regression",
    "on a SwiGLU network spectral steps help at a small batch and not at a large one",
    "Davis and Drusvyatskiy, figure 20",
    42,
    Sizes(),
    Sizes((96, 768), (41, 21), 24, 48, 10, 10),
    run,
    draw,
)
