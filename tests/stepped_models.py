"""Tiny models with their optimizers and rule assignments."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from models.blocks.in_graph_pc import with_gammas
from models.config import ModelConfig
from models.families import all_units
from models.pc_config import PCConfig
from models.units import Unit
from parallel.comm.groups import Groups
from parallel.model import ModelOptions, ParallelModel, build_model
from parallel.optimizer.distributed_optimizer import DistributedOptimizer, build_optimizer
from parallel.optimizer.routing import Assign, Assignment, PCAssignment, Penalty
from parallel.storage.bucket_layout import BucketPlanner
from spectral.effective_weight import Preconditioner
from spectral.rules import RULES, Rule
from training.assignments import assignments
from training.config import group_of
from training.config.optimizer_section import OptimizerConfig
from training.step import mean_loss

TINY = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab_size=60)
PENALTY = Penalty(coefficient=0.03, power=2, side="in", normalize=None)


def parallel_model(
    model: ModelConfig, groups: Groups, assign: Assign, *, apart: bool = False, **options: Any
) -> ParallelModel:
    """Build a model, by default in float64 with seed 3.

    `options` are fields of `ModelOptions`, of its `buckets`, and of its mappings. `apart` puts
    preconditioned units in separate buckets.
    """
    given = {"seed": 3, "sequence_length": 8, "dtype": torch.float64} | options
    buckets = BucketPlanner(
        preconditioned=lambda unit: apart and assign(unit).pc is not None,
        parameter_bytes=given["dtype"].itemsize,
        **taken(given, "alignment"),
    )
    mappings = {
        "engine": taken(given, "recompute", "fp8"),
        "split": taken(given, "qkv_units", "split_gate_up"),
        "loss": taken(given, "loss_chunk", "fused_loss", "z_loss"),
    }
    return build_model(model, groups, ModelOptions(buckets=buckets, **mappings, **given))


def taken(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """Pop the options with these names and return them."""
    return {name: options.pop(name) for name in names if name in options}


def stepped_model(
    model: ModelConfig,
    groups: Groups,
    assign: Assign,
    *,
    optimizer: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[ParallelModel, DistributedOptimizer]:
    """Build a model with `options`, and its optimizer with the `build_optimizer` options given."""
    built = parallel_model(model, groups, assign, **options)
    return built, build_optimizer(built, assign, **(optimizer or {}))


def gradient_of(model: ParallelModel, unit: Unit) -> Tensor:
    """Return a view of this rank's piece of the gradient of `unit`."""
    return unit.view(model.parameters[unit.parameter].main_grad)


def figures_of(
    model: ParallelModel, batch: dict[str, Tensor], *, train: bool = True
) -> list[dict[str, Tensor]]:
    """Run a forward pass and, if training, a backward pass of one micro-batch on this rank, and
    return its metrics."""
    size = len(batch["tokens"])
    return model.forward_backward(
        lambda: iter([batch]), mean_loss, microbatches=1, micro_batch=size, train=train
    )


def assigned(optimizer: OptimizerConfig, model: ModelConfig, pc: PCConfig | None) -> Assign:
    """Return the assignments of units and PC layer gammas in a run with this optimizer section."""
    units = all_units(model)
    return assignments(optimizer, units if pc is None else with_gammas(units, pc), pc)


def assign_to(rule: Rule) -> Assign:
    """Assign all matrices except routers to `rule`, and everything else to AdamW."""

    def assign(unit: Unit) -> Assignment:
        group = group_of(unit.role)
        mine = rule if group == "matrix" and unit.role != "router" else RULES["adamw"]()
        return Assignment(group, "under test", mine, 0.01, 0.1)

    return assign


def assign_matrices(
    rule: str,
    pc_level: int | None = None,
    penalised: Collection[str] = (),
    layer_factors: list[float] | None = None,
    penalty: Penalty = PENALTY,
) -> Assign:
    """Assign matrices to `rule`, and everything else to AdamW.

    With a `pc_level`, k and all matrices after attention are PC layers. The roles in `penalised`
    get a Gram penalty. `layer_factors` scale the learning rates of each layer's units and gammas.
    """
    pc = None
    if pc_level is not None:
        preconditioner = Preconditioner(level=pc_level, init_compensation=pc_level % 2 == 1)
        pc = PCAssignment(preconditioner, RULES["adamw"](), 0.03, 0.2)

    def assign(unit: Unit) -> Assignment:
        group = group_of(unit.role)
        name = rule if group == "matrix" else "adamw"
        factor = 1.0 if layer_factors is None or unit.layer is None else layer_factors[unit.layer]
        mapped = pc if unit.role in ("k", "o", "gate", "up", "down") else None
        if mapped is not None:
            mapped = replace(mapped, gamma_lr=mapped.gamma_lr * factor)
        added = penalty if unit.role in penalised else None
        return Assignment(group, name, RULES[name](), 0.02 * factor, 0.1, mapped, added)

    return assign
