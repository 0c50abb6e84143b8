"""What the ranks of the distributed tests run."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from models.config import ModelConfig
from models.initialize import normal
from models.units import Unit
from parallel import groups as process_groups
from parallel.build import build_optimizer
from parallel.model import ParallelModel, build_model
from parallel.routing import Assign, Assignment
from spectral.rules import RULES as RULE_CLASSES
from tests.run_configs import RULES, tiny_config
from training.config import group_of
from training.loop import StepResult
from training.run import build_data, build_trainer, config_routes, train


def start(layout: dict[str, int]) -> process_groups.Groups:
    """Process groups of a layout given by the keys of the config's `parallel` section."""
    return process_groups.initialize(**layout)


def rank_folder(folder: str) -> str:
    """A folder of this rank's own beside the shared token set, which it links to."""
    mine = Path(folder) / f"rank{dist.get_rank()}"
    mine.mkdir(parents=True, exist_ok=True)
    for suffix in (".bin", ".idx"):
        link = mine / f"tokens{suffix}"
        if not link.exists():
            link.symlink_to(Path(folder) / f"tokens{suffix}")
    return str(mine)


def curves(folder: str, layout: dict[str, int], overrides: dict[str, Any]) -> dict[str, Any]:
    """For every rule: the losses and gradient norms of a run, and its validation losses."""
    layout_groups = start(layout)
    results: dict[str, Any] = {}
    for rule in RULES:
        losses: list[float] = []
        norms: list[float] = []

        def keep(step: int, result: StepResult, losses=losses, norms=norms) -> None:
            losses.append(result.loss.item())
            norms.append(result.norm.total.item())

        config = tiny_config(
            rank_folder(folder),
            rule,
            **{f"parallel__{key}": value for key, value in layout.items()},
            **overrides,
        )
        outcome = train(config, layout_groups, on_step=keep)
        results[rule] = {"loss": losses, "norm": norms, "validation": outcome.validation}
    process_groups.shutdown()
    return results


def whole_unit(model: ParallelModel, layout: process_groups.Groups, unit: Unit) -> torch.Tensor:
    """The logical matrix of a unit, gathered over tensor-parallel ranks."""
    model.wait_for_weights()
    local = unit.view(model.parameters[unit.parameter].detach()).contiguous()
    if unit.shard_axis is None:
        return local.reshape(unit.shape)
    pieces = [torch.empty_like(local) for _ in range(layout.tensor.size)]
    dist.all_gather(pieces, local, group=layout.tensor.group)
    return torch.cat(pieces, unit.shard_axis).reshape(unit.shape)


def optimizer_steps(
    layout: dict[str, int], rules: list[str], steps: int, **unit_options: Any
) -> dict[str, dict[str, torch.Tensor]]:
    """For every rule: every whole unit after `steps` float64 steps on named gradients."""
    layout_groups = start(layout)
    found = {rule: units_after(layout_groups, rule, steps, **unit_options) for rule in rules}
    process_groups.shutdown()
    return found


def units_after(
    layout_groups: process_groups.Groups, rule: str, steps: int, **unit_options: Any
) -> dict[str, torch.Tensor]:
    """Every whole unit after `steps` float64 steps on gradients that depend on names alone."""
    config = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab_size=60)
    model = build_model(
        config,
        layout_groups,
        seed=3,
        sequence_length=8,
        dtype=torch.float64,
        elementwise=lambda unit: group_of(unit.role) != "matrix",
        sequence_parallel=layout_groups.tensor.size > 1,
        **unit_options,
    )
    optimizer = build_optimizer(model, assign_matrices(rule))
    for step in range(steps):
        for unit in model.units:
            whole = named_gradient(unit, step)
            tensor = layout_groups.tensor
            model.gradient(unit).copy_(unit.piece(whole, tensor.rank, tensor.size))
        optimizer.step(1.0, torch.tensor(True))
    return {unit.name: whole_unit(model, layout_groups, unit) for unit in model.units}


def named_gradient(unit: Unit, step: int) -> torch.Tensor:
    """A float64 gradient `[*shape]` of a whole unit, made of its draws like its initial value."""
    cols = unit.shape[-1]
    draws = unit.draws or ((unit.name, 1),)
    rows = [normal(f"gradient {step} {name}", (count, cols), 0) for name, count in draws]
    return torch.cat(rows).double().reshape(unit.shape)


def assign_matrices(rule: str) -> Assign:
    """Matrices to `rule`, everything else to AdamW."""

    def assign(role: str) -> Assignment:
        group = group_of(role)
        name = rule if group == "matrix" else "adamw"
        return Assignment(group, name, RULE_CLASSES[name](), 0.02, 0.1)

    return assign


def radius_errors(
    folder: str, layout: dict[str, int], rules: list[str], lr: float
) -> dict[str, dict[str, float]]:
    """For every rule: each unit's largest relative distance of its norm (float64 SVD) from its
    radius, over six steps."""
    layout_groups = start(layout)
    found = {rule: errors_of_run(folder, layout, layout_groups, rule, lr) for rule in rules}
    process_groups.shutdown()
    return found


def errors_of_run(
    folder: str,
    layout: dict[str, int],
    layout_groups: process_groups.Groups,
    rule: str,
    lr: float,
) -> dict[str, float]:
    """Each unit's largest relative distance of its norm from its radius over a run's six steps."""
    config = tiny_config(
        rank_folder(folder),
        rule,
        **{f"parallel__{key}": value for key, value in layout.items()},
        optimizer__matrix__lr=lr,
        schedule__kind="constant",
        schedule__warmup_steps=0,
        train__exit_step=6,
    )
    routes = {row.unit: row.radius for row in config_routes(config)}
    errors: dict[str, float] = {}
    trainer = build_trainer(config, layout_groups, *build_data(config))
    for step in range(6):
        trainer.step(step)
        for unit in trainer.model.units:
            if routes[unit.name] is None:
                continue
            whole = whole_unit(trainer.model, layout_groups, unit).double()
            error = abs(torch.linalg.matrix_norm(whole, ord=2).item() / routes[unit.name] - 1)
            errors[unit.name] = max(error, errors.get(unit.name, 0.0))
    return errors
