"""Figure 3 of the criterion paper: spectral descent wins on ReLU random features."""

import torch

from scripts.experiments.experiment import Draws, Outcome, at_least
from scripts.experiments.regression import descend, first_steps, panels, random_features
from spectral.measures import stable_rank

SMALL = {"sizes": (15, 30, 120), "steps": 60, "restart": 20}
RESTARTED = 100
"""Number of spectral descent steps after each restart."""
# The polar factor of a square gradient is orthogonal, so |polar(G) A|_F = |A|_F, and the spectral
# step decreases the loss by exactly the guaranteed amount, up to rounding.
ROUNDING = 1e-9


def experiment(
    draws: Draws,
    *,
    sizes: tuple[int, int, int] = (50, 100, 400),
    steps: int = 1000,
    restart: int = 100,
) -> Outcome:
    """Run both descents on A = relu(V X), and spectral descent from iterates of gradient descent:
    the iterate with the highest nuclear rank, and every `restart`-th iterate. For `sizes` see
    `random_features`."""
    task = random_features(draws, sizes, 1, torch.relu)
    stable = float(stable_rank(task.a))
    gd = descend(task, steps, spectral=False)
    spec = descend(task, steps, spectral=True)
    peak = max(range(steps), key=gd.ranks.__getitem__)
    from_peak = descend(task, steps - peak, spectral=True, start=gd.weights[peak])
    restarts = {
        t: descend(task, min(RESTARTED, steps), spectral=True, start=gd.weights[t]).losses
        for t in range(restart, steps, restart)
    }
    early = steps // 5
    ratio = gd.losses[early] / spec.losses[early]
    theory = "theory, eq. 1.5"
    checks = [
        at_least("GD: least decrease / guaranteed", gd.kept(), 1 - ROUNDING, theory),
        at_least("SpecGD: least decrease / guaranteed", spec.kept(), 1 - ROUNDING, theory),
        at_least(f"loss of GD / SpecGD, step {early}", ratio, 1, "paper"),
        at_least("share of GD steps with nr >= st", gd.share(stable), 1, "paper"),
        *first_steps(task),
    ]
    data = {
        "stable_rank": stable,
        "gd": gd.data(stable),
        "spectral": spec.data(stable),
        "peak": peak,
        "from_peak": from_peak.losses,
        "restarts": restarts,
    }
    runs = {"gradient descent": gd, "spectral descent": spec}
    return Outcome(checks, data, panels("ReLU features: loss", stable, runs))
