"""Plans of one model on one number of GPUs under many layouts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from parallel.plan.devices import Device
from parallel.plan.planner import (
    Plan,
    StagePlan,
    assemble,
    completed,
    plan_stage,
)
from parallel.plan.step_shape import PlanInputs, StepShape
from parallel.storage.stage_units import declare_stage_units
from training.assignments import config_assignments, config_units, unit_options
from training.config import Config
from training.config.checks import fits, holds, layout_checks, run_checks
from training.dry_run import step_flops, step_shape

Changes = Mapping[str, Any]
"""New values by dotted key of two parts, such as `train.recompute`."""

AXES: Final = (
    "tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor",
)  # fmt: skip


LEVELS: Final = ("none", "selective", "full")
"""Values of `train.recompute`, the cheapest in time first."""


@dataclass(frozen=True)
class Variant:
    """Changes of a config, and the plan with them."""

    changes: Changes
    plan: Plan

    @property
    def seconds(self) -> float:
        """Modelled time of a step."""
        return self.plan.time.total


def changed(config: Config, changes: Changes) -> Config:
    """Return `config` with other values."""
    sections = by_section(changes)
    parts = {name: replace(getattr(config, name), **new) for name, new in sections.items()}
    return replace(config, **parts)


def by_section(changes: Changes) -> dict[str, dict[str, Any]]:
    """Return changes as a config file has them."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return sections


class Layouts:
    """Planner of variants of a config, which plans a stage once for all that leave it as it is.

    gpus     of all variants
    """

    def __init__(self, config: Config, gpus: int, device: Device) -> None:
        self.config = config
        self.gpus = gpus
        self.device = device
        self.assign = config_assignments(config)
        self.known: dict[object, StagePlan] = {}

    def legal(self, changes: Changes) -> bool:
        """Return whether a variant's layout and batch are possible."""
        config = changed(self.config, changes)
        return holds(layout_checks(config)) and fits(config, self.gpus)

    def sound(self, changes: Changes) -> bool:
        """Return whether a variant's sections agree, the layout aside."""
        return holds(run_checks(changed(self.config, changes)))

    def shape(self, changes: Changes) -> StepShape:
        """Return the shape of a variant's step."""
        return step_shape(changed(self.config, changes), self.gpus, self.device)

    def plan(self, changes: Changes) -> Plan:
        """Return the plan of a variant."""
        shape = self.shape(changes)
        stages = [self._stage(shape, stage) for stage in range(shape.inputs.pipeline)]
        return assemble(shape, stages, step_flops(self.config))

    def fitting_plan(self, changes: Changes) -> Plan | None:
        """Return the plan of a variant, None as soon as one of its stages does not fit."""
        shape = self.shape(changes)
        stages: dict[int, StagePlan] = {}
        number = shape.inputs.pipeline
        # The first stage has most activations, the first and the last have the vocabulary.
        for stage in dict.fromkeys((0, number - 1, *range(number))):
            stages[stage] = self._stage(shape, stage)
            if stages[stage].memory.total > self.device.room:
                return None
        return assemble(shape, [stages[i] for i in range(number)], step_flops(self.config))

    def owned_flops(self) -> float:
        """Return the FLOPs per step of the rules of all matrices that have an owner."""
        costs: dict[object, float] = {}
        total = 0.0
        for unit in config_units(self.config):
            assigned = self.assign(unit)
            if assigned.whole_matrix:
                key = (assigned.rule, assigned.pc, assigned.penalty, unit.shape)
                if key not in costs:
                    costs[key] = assigned.cost(unit.shape)
                total += costs[key]
        return total

    def _stage(self, shape: StepShape, stage: int) -> StagePlan:
        # A plan without activations, which stages with as many layers of each kind share.
        inputs: PlanInputs = replace(shape.inputs, context=1, recompute="none", loss_chunk=None)
        chunks = shape.chunks(stage)
        kind: object = (
            tuple(shape.kinds(stage).values()),
            tuple(len(chunk.layers) for chunk in chunks),
            any(chunk.embedding for chunk in chunks),
            any(chunk.head for chunk in chunks),
        )
        layers = (layer for chunk in chunks for layer in chunk.layers)
        if self.config.pc is not None or self.config.model.moe is not None:
            dense = self.config.model.moe.dense_layers if self.config.model.moe else 0
            kind = (kind, sum(layer < dense for layer in layers), self.config.pc and stage)
        key = (inputs, kind)
        if key not in self.known:
            units = declare_stage_units(shape.model, chunks, inputs, **unit_options(self.config))
            self.known[key] = plan_stage(units, self.assign, inputs)
        return completed(self.known[key], shape, stage)
