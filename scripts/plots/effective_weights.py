"""Plot the singular values of W and PC(W) in a checkpoint, and the PC layer polynomials."""

from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from scripts.plots.style import COLORS, literal, new_figure
from spectral.effective_weight import DOMAIN
from spectral.odd_polynomial import PRESETS, evaluate
from training.checkpoint.checkpoints import problems, read_checkpoint
from training.checkpoint.stored_checkpoint import CheckpointWeights
from training.errors import BrokenCheckpointError, InputError

BINS = 60


def plot_spectrum(path: Path, roles: list[str] | None = None) -> Figure:
    """Draw a histogram of the units' singular values for each role.

    Each singular value is divided by its unit's largest singular value. For PC layers, the
    histogram also shows PC(W). `path` is a run folder or a checkpoint. By default, all matrix roles
    except embedding and head are drawn. Raises InputError for a role that is not in the model.
    """
    info = read_checkpoint(path)
    for problem in problems(info):
        raise BrokenCheckpointError(problem)
    weights = CheckpointWeights(info)
    units = [unit for unit in weights.units if unit.is_matrix]
    present = list(dict.fromkeys(u.role for u in units))
    for role in roles or []:
        if role not in present:
            raise InputError(f"--roles must be among {', '.join(present)}, got {role}")
    shown = roles or [role for role in present if role not in ("embedding", "head")]
    figure, axes = new_figure(len(shown), width=2.8, height=3.0)
    for axis, role in zip(axes, shown, strict=True):
        chosen = [u for u in units if u.role == role]
        before = torch.cat([normalised(weights.weight(u)) for u in chosen])
        edges = torch.linspace(0, 1, BINS + 1).tolist()
        style: dict[str, Any] = {"bins": edges, "histtype": "stepfilled", "alpha": 0.55}
        axis.hist(before, color=COLORS[0], label="W", **style)
        if weights.preconditioned(chosen[0]):
            after = torch.cat([normalised(weights.effective(u)) for u in chosen])
            axis.hist(after, color=COLORS[1], label="PC(W)", **style)
        axis.set(title=role, xlabel="singular value / largest", yticks=[])
        axis.legend(fontsize=8)
    figure.suptitle(f"{literal(weights.config.run.name)}, step {weights.info.step}")
    return figure


def normalised(weight: Tensor) -> Tensor:
    """Return the singular values divided by the largest one, or zeros for a zero matrix."""
    values = torch.linalg.svdvals(weight)
    return values / values[0].clamp(min=torch.finfo(values.dtype).tiny)


CUTOFFS = {1: 0.8, 2: 0.6, 3: 0.4, 4: 0.3}
BEYOND = 1.2


def plot_maps() -> Figure:
    """Draw the polynomial g of each level, the target of g, and the factor g(x) / x.

    The polynomials are valid up to `DOMAIN`. The area to the right of `DOMAIN` is shaded grey.
    """
    figure, (left, right) = new_figure(2)
    x = torch.linspace(0, BEYOND, 600, dtype=torch.float64)
    for level in PRESETS:
        name = f"level {level}" if level else "level 0 (identity)"
        (line,) = left.plot(x, evaluate(x, level), label=name)
        if level:
            target = (x / CUTOFFS[level]).clamp(max=1)
            left.plot(x, target, color=line.get_color(), linewidth=0.8, linestyle=":")
    left.axvspan(DOMAIN, BEYOND, color="0.5", alpha=0.15, linewidth=0)
    left.set(
        xlabel="singular value / largest", ylabel="g", xlim=(0, BEYOND), ylim=(0, 1.3),
        title="Polynomials (dotted: targets)",
    )  # fmt: skip
    left.legend(loc="lower right")
    small = torch.logspace(-3, 0, 300, dtype=torch.float64)
    for level in PRESETS:
        right.plot(small, evaluate(small, level) / small)
    right.set(
        xscale="log", xlabel="singular value / largest", ylabel="g(x) / x",
        title="Factor on each singular value",
    )  # fmt: skip
    return figure
