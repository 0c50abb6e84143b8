"""Figure 3 of the criterion paper: spectral descent wins on ReLU random features."""

from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

from scripts.experiments import regression
from scripts.experiments.check import at_least
from scripts.experiments.experiment import Data, Experiment, Outcome
from scripts.experiments.regression import ROUNDING, descend, first_steps, random_features
from scripts.plots.style import COLORS, draw_lines, new_figure
from spectral.measures import stable_rank


@dataclass(frozen=True)
class Sizes(regression.Sizes):
    """Those of the problem, and a restart every `restart` steps."""

    steps: int = 1000
    restart: int = 100


RESTARTED = 100
"""Steps of spectral descent after every restart."""


def run(sizes: Sizes, seed: int) -> Outcome:
    """Run both descents on A = relu(V X), and spectral descent from iterates of gradient
    descent."""
    task = random_features(sizes, seed, 1, torch.relu)
    stable = float(stable_rank(task.a))
    points = tuple(range(0, sizes.steps, sizes.restart))
    gd = descend(task, sizes.steps, spectral=False, keep=tuple(range(sizes.steps)))
    spec = descend(task, sizes.steps, spectral=True)
    peak = max(range(sizes.steps), key=gd.ranks.__getitem__)
    from_peak = descend(task, sizes.steps - peak, spectral=True, start=gd.weights[peak])
    length = min(RESTARTED, sizes.steps)
    restarts = {
        t: descend(task, length, spectral=True, start=gd.weights[t]).losses for t in points[1:]
    }
    early = sizes.steps // 5
    ratio = gd.losses[early] / spec.losses[early]
    checks = [
        at_least("GD: least decrease / guaranteed", gd.kept(), 1 - ROUNDING, "theory, eq. 1.5"),
        at_least(
            "SpecGD: least decrease / guaranteed", spec.kept(), 1 - ROUNDING, "theory, eq. 1.5"
        ),
        at_least(f"loss of GD / SpecGD, step {early}", ratio, 1, "paper"),
        at_least("share of GD steps with nr >= st", gd.share(stable), 1, "paper"),
    ]
    checks += first_steps(task)
    data: Data = {
        "stable_rank": stable,
        "gd": gd.data(stable),
        "spectral": spec.data(stable),
        "peak": peak,
        "from_peak": from_peak.losses,
        "restarts": restarts,
    }
    return Outcome(checks, data)


def draw(data: Data, title: str = "ReLU features") -> Figure:
    """Draw loss and nuclear rank of both descents, with restarts."""
    figure, (left, right) = new_figure(2)
    names = {"gradient descent": "gd", "spectral descent": "spectral"}
    for color, (name, key) in zip(COLORS, names.items(), strict=False):
        # The rank of spectral descent alternates, so even and odd steps are separate lines.
        ranks = data[key]["nuclear_rank"]
        for first, label in ((0, name), (1, None)):
            steps = range(first, len(ranks), 2)
            right.plot(steps, ranks[first::2], color=color, label=label, linewidth=1.2)
    for index, (start, losses) in enumerate(data.get("restarts", {}).items()):
        label = "spectral descent from a GD iterate" if index == 0 else None
        times = range(int(start), int(start) + len(losses))
        left.plot(times, losses, color=COLORS[1], linestyle=":", linewidth=1.0, label=label)
    right.axhline(data["stable_rank"], color="0.2", linestyle="--", label="st(A)")
    draw_lines(left, {name: data[key]["loss"] for name, key in names.items()},
               yscale="log", xlabel="step", ylabel="loss", title=f"{title}: loss")  # fmt: skip
    draw_lines(
        right, {}, xlabel="step", ylabel="nuclear rank of the gradient", title="nuclear rank"
    )
    return figure


EXPERIMENT = Experiment(__name__, __doc__, run, draw, Sizes(), Sizes(15, 30, 120, 60, 20))
