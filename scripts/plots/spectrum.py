"""Singular values of a checkpoint's weights, and of what its PC layers make of them."""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from models.units import Unit
from scripts.plots.style import COLORS, new_figure
from training.checkpoint import CheckpointInfo, read_checkpoint
from training.errors import InputError
from training.run import config_units

BINS = 60


def plot_spectrum(path: Path, roles: list[str] | None = None) -> Figure:
    """A histogram per role of its units' singular values, each divided by its unit's largest: of W,
    and of PC(W) where the run has PC layers.

    `path` is a run folder or a checkpoint; `roles` null shows all roles of matrices but embedding
    and head. Raises InputError for a role that the model lacks.
    """
    info = read_checkpoint(path)
    units = [u for u in config_units(info.config) if u.is_matrix]
    known = list(dict.fromkeys(u.role for u in units))
    for role in roles or []:
        if role not in known:
            raise InputError(f"roles must be among {', '.join(known)}, got {role}")
    shown = roles or [role for role in known if role not in ("embedding", "head")]
    figure, axes = new_figure(len(shown), width=2.8, height=3.0)
    weights = info.tensors()
    pairs = info.tensors("pc/")
    for axis, role in zip(axes, shown, strict=True):
        chosen = [u for u in units if u.role == role]
        before = torch.cat([normalised(plain(u, weights)) for u in chosen])
        edges = torch.linspace(0, 1, BINS + 1).tolist()
        style = {"bins": edges, "histtype": "stepfilled", "alpha": 0.55}
        axis.hist(before, color=COLORS[0], label="W", **style)
        if info.config.pc is not None and info.config.pc.covers(chosen[0]):
            after = torch.cat([normalised(effective(info, u, weights, pairs)) for u in chosen])
            axis.hist(after, color=COLORS[1], label="PC(W)", **style)
        axis.set(title=role, xlabel="singular value / largest", yticks=[])
        axis.legend(fontsize=8)
    figure.suptitle(f"{info.config.run.name}, step {info.step}")
    return figure


def plain(unit: Unit, weights: dict[str, Tensor]) -> Tensor:
    """W `[rows, cols]` of a unit, float64."""
    return weights[f"weight/{unit.name}"].reshape(unit.shape).double()


def effective(
    info: CheckpointInfo, unit: Unit, weights: dict[str, Tensor], pairs: dict[str, Tensor]
) -> Tensor:
    """PC(W) `[rows, cols]` of a unit, float64."""
    pc = info.config.pc
    preconditioner = None if pc is None else pc.preconditioner(unit)
    assert preconditioner is not None
    u, v = (pairs[f"pc/{unit.name}/{side}"].double()[None] for side in "uv")
    gamma = weights[f"weight/{unit.name}.gamma"].double()
    return preconditioner.effective(plain(unit, weights)[None], u, v, gamma)[0]


def normalised(weight: Tensor) -> Tensor:
    """Singular values, the largest 1; of zeros, zeros."""
    values = torch.linalg.svdvals(weight)
    return values / values[0].clamp(min=torch.finfo(values.dtype).tiny)
