"""Figure 11 of the criterion paper: on SwiGLU features the two descents cross."""

import math

from torch.nn import functional as F

from scripts.experiments.experiment import Draws, Outcome, at_least, at_most
from scripts.experiments.regression import descend, first_steps, panels, random_features
from spectral.measures import stable_rank

SMALL = {"sizes": (25, 50, 200), "steps": 200}


def experiment(
    draws: Draws, *, sizes: tuple[int, int, int] = (50, 100, 400), steps: int = 400
) -> Outcome:
    """Run both descents on A = silu(V_1 X) * (V_2 X) and find the step at which the losses cross;
    for `sizes` see `random_features`."""
    task = random_features(draws, sizes, 2, lambda gate, up: F.silu(gate) * up)
    stable = float(stable_rank(task.a))
    gd = descend(task, steps, spectral=False)
    spec = descend(task, steps, spectral=True)
    ahead = [t for t in range(1, steps) if spec.losses[t] < gd.losses[t]]
    crossing = max(ahead, default=0) + 1
    checks = [
        at_least("st(A), above that of ReLU", stable, math.pi, "paper"),
        at_least("steps with SpecGD ahead", len(ahead), 5, "recorded"),
        at_most("last loss of GD / SpecGD", gd.losses[-1] / spec.losses[-1], 1, "paper"),
        at_most("share of GD steps with nr >= st, minority", gd.share(stable), 0.5, "paper"),
        *first_steps(task),
    ]
    data = {
        "stable_rank": stable,
        "crossing": crossing,
        "gd": gd.data(stable),
        "spectral": spec.data(stable),
    }
    runs = {"gradient descent": gd, "spectral descent": spec}
    title = f"SwiGLU features: loss, which crosses at step {crossing}"
    return Outcome(checks, data, panels(title, stable, runs))
