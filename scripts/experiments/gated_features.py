"""Figure 11 of the criterion paper: on SwiGLU features the two descents cross."""

import math

from matplotlib.figure import Figure
from torch.nn import functional as F

from scripts.experiments import relu_features
from scripts.experiments.check import at_least, at_most
from scripts.experiments.experiment import Data, Experiment, Outcome
from scripts.experiments.regression import Sizes, descend, first_steps, random_features
from spectral.measures import stable_rank


def run(sizes: Sizes, seed: int) -> Outcome:
    """Run both descents on A = silu(V_1 X) * (V_2 X) and find where they cross."""
    task = random_features(sizes, seed, 2, lambda gate, up: F.silu(gate) * up)
    stable = float(stable_rank(task.a))
    gd = descend(task, sizes.steps, spectral=False)
    spec = descend(task, sizes.steps, spectral=True)
    ahead = [t for t in range(1, sizes.steps) if spec.losses[t] < gd.losses[t]]
    crossing = max(ahead, default=0) + 1
    checks = [
        at_least("st(A), above that of ReLU", stable, math.pi, "paper"),
        at_least("steps with SpecGD ahead", len(ahead), 5, "recorded"),
        at_most("last loss of GD / SpecGD", gd.losses[-1] / spec.losses[-1], 1, "paper"),
        at_most("share of GD steps with nr >= st, minority", gd.share(stable), 0.5, "paper"),
    ]
    checks += first_steps(task)
    data: Data = {
        "stable_rank": stable,
        "crossing": crossing,
        "gd": gd.data(stable),
        "spectral": spec.data(stable),
    }
    return Outcome(checks, data)


def draw(data: Data) -> Figure:
    """Draw loss and nuclear rank of both descents, and the step at which they cross."""
    figure = relu_features.draw(data, "SwiGLU features")
    figure.axes[0].axvline(data["crossing"], color="0.4", linestyle=":", linewidth=1)
    return figure


EXPERIMENT = Experiment(__name__, __doc__, run, draw, Sizes(), Sizes(25, 50, 200, 200))
