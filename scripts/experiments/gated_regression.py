"""Figure 20 of the criterion paper: on a SwiGLU network, spectral steps help at a small batch and
do not help at a large batch."""

from scripts.experiments.experiment import Check, Draws, Outcome, Panel, at_least, at_most
from scripts.experiments.networks import Method, Problem, Training, first_step, train

SMALL = {
    "batches": (96, 768), "steps": (41, 21), "inputs": 24, "hidden": 48, "interval": 10,
    "polar_steps": 10,
}  # fmt: skip
RATES = {"small": {"gd": 0.01, "spectral": 0.025}, "large": {"gd": 0.0035, "spectral": 0.0015}}


def experiment(
    draws: Draws,
    *,
    batches: tuple[int, int] = (512, 8196),
    steps: tuple[int, int] = (101, 41),
    inputs: int = 128,
    hidden: int = 512,
    interval: int = 20,
    polar_steps: int = 20,
) -> Outcome:
    """Run both methods at both batch sizes.

    The paper takes 400 and 280 steps. Fewer steps suffice, because the losses separate early.
    """
    runs: dict[str, dict[str, Training]] = {name: {} for name in RATES}
    first = []
    for (name, rates), batch, length in zip(RATES.items(), batches, steps, strict=True):
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
    drift = max(run.drift() for run in runs["small"].values())
    data = {name: {key: run.data() for key, run in each.items()} for name, each in runs.items()}
    return Outcome(properties(runs) + first, {**data, "drift": drift}, panels)


def properties(runs: dict[str, dict[str, Training]]) -> list[Check]:
    """Check the paper's statements about the two batch sizes."""
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
