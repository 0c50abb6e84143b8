"""What the ranks of the tests of the Gram penalty run."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.units import Unit
from parallel.comm.groups import Groups
from tests.distributed.monitor_workers import whole_parameters
from tests.distributed.state_workers import started
from tests.distributed.workers import rank_folder, whole_gradients
from tests.run_configs import tiny_config
from training.build import build_data, build_trainer
from training.loop import Trainer

Case = tuple[dict[str, int], str, dict[str, Any]]
"""Layout, rule and keys of the config."""


def built(folder: str, groups: Groups, case: Case, **more: Any) -> Trainer:
    """The trainer of a case."""
    layout, rule, keys = case
    placed = {f"parallel__{key}": value for key, value in layout.items()}
    config = tiny_config(rank_folder(folder), rule, **placed, **{**keys, **more})
    return build_trainer(config, groups, *build_data(config))


def penalised(folder: str, cases: list[Case], steps: int) -> list[dict[str, Any]]:
    """What the penalty logs of each step, the gradients that it adds in the first, and the losses.

    The gradients are those of this rank's whole units, each beside the wanted one; all per case.
    """
    found = []
    for (_, groups), case in zip(started([layout for layout, *_ in cases]), cases, strict=True):
        trainer = built(folder, groups, case)
        assert trainer.penalty is not None
        add, gradients = trainer.penalty.add, []

        def watched(index: int, add=add, gradients=gradients, trainer=trainer, groups=groups):
            gradients.append(whole_gradients(trainer.model))
            add(index)
            gradients.append(whole_gradients(trainer.model))

        trainer.penalty.add = watched  # type: ignore[method-assign]
        weights = whole_parameters(trainer, groups)
        lines, losses = [], []
        trainer.on_step = lambda _, result, losses=losses: losses.append(result.loss.item())
        trainer.report = lambda metrics, step, lines=lines: lines.append(metrics)
        for _ in range(steps):
            trainer.advance()
        added = {name: gradients[1][name] - before for name, before in gradients[0].items()}
        wanted = {
            unit.name: wanted_gradient(trainer, unit, weights[unit.name])
            for unit in trainer.model.units
            if unit.is_matrix
        }
        kept = [{k: v for k, v in line.items() if k.startswith("penalty/")} for line in lines]
        found.append({"lines": kept, "losses": losses, "added": added, "wanted": wanted})
        dist.barrier(groups.host)
    return found


def wanted_gradient(trainer: Trainer, unit: Unit, weight: Tensor) -> Tensor:
    """Gradient of the penalty of a whole unit, from the penalty's definition in float64."""
    section = trainer.config.gram_penalty
    assert section is not None
    if unit.role not in section.roles:
        return torch.zeros(unit.shape, dtype=torch.float64)
    wide = weight.double().requires_grad_()
    gram = wide.T @ wide
    penalty = section.coefficient * (gram - torch.diag(torch.diag(gram))).square().sum()
    (gradient,) = torch.autograd.grad(penalty, wide)
    return gradient
