"""Search for the fastest layout for a model on a given number of GPUs.

Lower bounds on a layout's memory and step time are cheap to compute. Layouts are planned in
ascending order of the bound on their step time, until no remaining layout can be among the best.
Therefore the result is optimal over all legal layouts.
"""

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from heapq import nsmallest
from typing import Any, Final

from models.families import declare_stage_units
from parallel.plan.activation_costs import stage_activations
from parallel.plan.devices import GIB, Device
from parallel.plan.planner import Plan, StagePlan, assemble, completed, plan_stage
from parallel.plan.step_shape import PlanInputs, Replicas, StepShape
from parallel.plan.step_time import (
    OptimizerLoad,
    StageTime,
    bubble_seconds,
    optimizer_parts,
    rule_seconds,
    stage_elements,
    stage_time,
)
from training.assignments import config_assignments, config_units, unit_options
from training.config import Config
from training.config.checks import divisors, fits, holds, layout_checks, run_checks
from training.config.yaml_files import as_yaml, escaped, merged_overrides, over
from training.dry_run import step_flops, step_shape
from training.report.text import progress, table

Changes = Mapping[str, Any]
"""Maps keys of the form `section.name`, e.g. `train.recompute`, to their new values."""

AXES: Final = (
    "tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor",
)  # fmt: skip


LEVELS: Final = ("none", "selective", "full")
"""Values of `train.recompute`, from fastest to slowest."""

LOSS_CHUNK: Final = 16384
"""Value of `train.loss_chunk` that the planner tries if the config sets none."""


@dataclass(frozen=True)
class Variant:
    """A variant of a config: its changes and plan."""

    changes: Changes
    plan: Plan

    @property
    def seconds(self) -> float:
        """Modelled step time."""
        return self.plan.time.total


def changed(config: Config, changes: Changes) -> Config:
    """Return `config` with `changes` applied."""
    sections = by_section(changes)
    parts = {name: replace(getattr(config, name), **new) for name, new in sections.items()}
    return replace(config, **parts)


def by_section(changes: Changes) -> dict[str, dict[str, Any]]:
    """Group `changes` into one mapping per section, as in a config file."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return sections


class Layouts:
    """Plans variants of a config. Stage plans are cached and shared between variants.

    gpus     number of GPUs, the same for all variants
    """

    def __init__(self, config: Config, gpus: int, device: Device) -> None:
        self.config = config
        self.gpus = gpus
        self.device = device
        self.assign = config_assignments(config)
        self.planned: dict[object, StagePlan] = {}

    def legal(self, changes: Changes) -> bool:
        """Return whether a variant's layout and batch size are legal."""
        config = changed(self.config, changes)
        return holds(layout_checks(config)) and fits(config, self.gpus)

    def sound(self, changes: Changes) -> bool:
        """Return whether a variant passes the cross-section checks that are unrelated to the
        layout."""
        return holds(run_checks(changed(self.config, changes)))

    def shape(self, changes: Changes) -> StepShape:
        """Return the `StepShape` of a variant."""
        return step_shape(changed(self.config, changes), self.gpus, self.device)

    def plan(self, changes: Changes) -> Plan:
        """Plan a variant."""
        shape = self.shape(changes)
        stages = [self._stage(shape, stage) for stage in range(shape.inputs.pipeline)]
        return assemble(shape, stages, step_flops(self.config))

    def fitting_plan(self, changes: Changes) -> Plan | None:
        """Plan a variant. Return None if any stage does not fit."""
        shape = self.shape(changes)
        stages: dict[int, StagePlan] = {}
        number = shape.inputs.pipeline
        # Plan the stages that use the most memory first: the first stage stores the most
        # activations, and the first and last stages hold the embedding and the head.
        for stage in dict.fromkeys((0, number - 1, *range(number))):
            stages[stage] = self._stage(shape, stage)
            if stages[stage].memory.total > self.device.room:
                return None
        return assemble(shape, [stages[i] for i in range(number)], step_flops(self.config))

    def owned_flops(self) -> float:
        """Return the FLOPs per step of the update rules, summed over all matrices that have an
        owner. With `tensor_mode` shardwise, which splits these matrices, return the lower bound 0.
        """
        if self.config.optimizer.distributed.tensor_mode == "shardwise":
            return 0.0
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
        # Stages with the same number of layers of each kind share a plan. The plan does not include
        # activations.
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
        if key not in self.planned:
            units = declare_stage_units(shape.model, chunks, inputs, **unit_options(self.config))
            self.planned[key] = plan_stage(units, self.assign, inputs)
        return completed(self.planned[key], shape, stage)


BEST: Final = 10


def best_layouts(layouts: Layouts) -> list[Variant]:
    """Return the `BEST` fastest layouts that fit, from fastest to slowest. Each layout is returned
    with the micro-batch size, recomputation and loss chunk for which it is fastest."""
    flops = layouts.owned_flops()
    bounds: list[tuple[float, Changes]] = []
    with progress(lambda: f"comparing lower bounds: {len(bounds):,} layouts may fit so far"):
        for changes in legal_layouts(layouts):
            shape = layouts.shape(changes)
            if fits_at_best(shape, layouts.device.room):
                bounds.append((least_seconds(shape, flops), changes))
    ordered = sorted(bounds, key=lambda each: each[0])
    best: dict[tuple[int, ...], Variant] = {}
    slowest = math.inf
    tried = 0
    print(f"planning up to {len(ordered):,} layouts, the most promising first", file=sys.stderr)
    with progress(lambda: f"planning layout {tried:,} of {len(ordered):,}"):
        for bound, changes in ordered:
            if bound >= slowest:
                break
            tried += 1
            axes = tuple(changes[f"parallel.{name}"] for name in AXES)
            if axes in best and bound >= best[axes].seconds:
                continue
            planned = layouts.fitting_plan(changes)
            if planned is None or (axes in best and planned.time.total >= best[axes].seconds):
                continue
            best[axes] = Variant(changes, planned)
            seconds = nsmallest(BEST, (each.seconds for each in best.values()))
            slowest = seconds[-1] if len(seconds) == BEST else math.inf
    return nsmallest(BEST, best.values(), key=lambda each: each.seconds)


def legal_layouts(layouts: Layouts) -> Iterator[Changes]:
    """Yield the changes for each legal combination of layout, micro-batch size, recomputation and
    loss chunk."""
    config, batch = layouts.config, math.gcd(*layouts.config.train.batches)
    chunks = (config.train.loss_chunk or LOSS_CHUNK, None)
    levels = [each for each in LEVELS if layouts.sound({"train.recompute": each})]
    for axes in _splits(layouts):
        base: dict[str, Any] = {f"parallel.{name}": axes[name] for name in AXES}
        base |= {f"parallel.{key}_stage_layers": None for key in ("first", "last")}
        copies = layouts.gpus // (axes["tensor"] * axes["pipeline"] * axes["context"])
        if batch % copies or not layouts.legal(base | {"train.micro_batch": 1}):
            continue
        for micro_batch in divisors(batch // copies):
            count = batch // copies // micro_batch
            if axes["virtual_pipeline"] > 1 and count % axes["pipeline"]:
                continue
            for recompute in levels:
                for chunk in chunks:
                    yield base | {
                        "train.micro_batch": micro_batch,
                        "train.recompute": recompute,
                        "train.loss_chunk": chunk,
                    }


def _splits(layouts: Layouts) -> Iterator[dict[str, int]]:
    """Yield all combinations of axis sizes for which ranks that share matrices or sequences are on
    the same node."""
    model, gpus, node = layouts.config.model, layouts.gpus, layouts.device.node_size
    experts = divisors(model.moe.experts) if model.moe is not None else [1]
    parts = divisors(node) if model.moe is not None else [1]
    for tensor in divisors(min(gpus, node)):
        for pipeline in (n for n in divisors(gpus // tensor) if model.layers % n == 0):
            stages = divisors(model.layers // pipeline) if pipeline > 1 else [1]
            for context in divisors(min(gpus // tensor // pipeline, node // tensor)):
                for virtual in stages:
                    for expert in experts:
                        for part in parts:
                            if gpus // pipeline % (expert * part) == 0:
                                sizes = (tensor, pipeline, virtual, context, expert, part)
                                yield dict(zip(AXES, sizes, strict=True))


def least_permanent(shape: StepShape, stage: int) -> int:
    """Return the bytes of weights, gradients and masters on a rank of a stage, excluding
    padding."""
    dense, experts = stage_elements(shape, stage)
    itemsize = shape.inputs.dtype.itemsize
    copies = shape.links("experts").size
    master = 4 * (dense // shape.inputs.data + experts // copies) if itemsize < 4 else 0
    return (dense + experts) * (itemsize + shape.inputs.gradient_bytes) + master


def fits_at_best(shape: StepShape, room: int) -> bool:
    """Return whether the minimum memory of every stage fits in `room` bytes per rank."""
    return all(
        least_permanent(shape, stage) + stage_activations(shape, stage) <= room
        for stage in range(shape.inputs.pipeline)
    )


def least_seconds(shape: StepShape, owned_flops: float) -> float:
    """Return a lower bound, in seconds, on the step time of any plan with this layout.

    `owned_flops` are the FLOPs of the rules for all matrices. The bound splits these FLOPs evenly
    across ranks.
    """
    times = [stage_time(shape, stage) for stage in range(shape.inputs.pipeline)]
    rules = rule_seconds(shape, owned_flops / shape.inputs.stage_ranks / shape.inputs.pipeline)
    parts = [least_optimizer_seconds(shape, stage, time) for stage, time in enumerate(times)]
    optimizer = max(*parts, sum(parts) / len(parts) + rules)
    slowest = max(stage.total for stage in times)
    return shape.microbatches * slowest + bubble_seconds(shape, times) + optimizer


def least_optimizer_seconds(shape: StepShape, stage: int, time: StageTime) -> float:
    """Return the time in seconds of a stage's optimizer phase, excluding rule matmuls and
    exchange."""
    dense, experts = stage_elements(shape, stage)
    itemsize = shape.inputs.dtype.itemsize
    sizes: dict[Replicas, int] = {"dense": dense, "experts": experts}
    copies = {name: shape.links(name).size for name in sizes}
    shares = {name: size * (copies[name] - 1) / copies[name] for name, size in sizes.items()}
    load = OptimizerLoad(
        flops=0.0,
        elements=sum(size / copies[name] for name, size in sizes.items()),
        gradients={name: shape.inputs.gradient_bytes * share for name, share in shares.items()},
        weights={name: itemsize * share for name, share in shares.items()},
    )
    return sum(optimizer_parts(shape, time, load))


def search_table(variants: list[Variant]) -> str:
    """Return a table with one row per layout, which shows the layout's sizes, step time, memory and
    main bottleneck."""
    rows = []
    for each in variants:
        time = asdict(each.plan.time)
        useful = time.pop("forward") + time.pop("backward")
        cost = max(time, key=lambda name: time[name])
        rows.append(
            (
                *(each.changes[f"parallel.{name}"] for name in AXES),
                each.changes["train.micro_batch"],
                each.changes["train.recompute"],
                each.changes["train.loss_chunk"] or "all",
                f"{each.plan.time.total:.3f}",
                f"{each.plan.mfu:.1%}",
                f"{each.plan.memory.total / GIB:.1f}",
                f"{cost} {time[cost] / each.plan.time.total:.1%}, computing "
                f"{useful / each.plan.time.total:.1%}",
            )
        )
    header = (
        "tensor", "pipeline", "virtual", "context", "expert", "expert-tensor", "micro-batch",
        "recompute", "loss chunk", "step s", "MFU", "GiB", "limited by",
    )  # fmt: skip
    return table(header, rows)


def overlay(
    layouts: Layouts, best: Variant, base: str, name: str, device: str, overrides: Sequence[str]
) -> str:
    """Return the text of a config named `name` that extends the file `base` with the layout of
    `best`.

    The config includes the `overrides` given on the command line, so that the config describes the
    same run.

    device     value for `plan.device`: a device name or the path of a YAML file
    """
    config = layouts.config
    changes = {k: v for k, v in best.changes.items() if changed(config, {k: v}) != config}
    changes |= {"plan.gpus": layouts.gpus, "plan.device": device, "run.name": name}
    named = rf"(?<![^/]){re.escape(config.run.name)}(?![^/])"
    changes["run.dir"] = re.sub(named, lambda _: name, config.run.dir)
    content = over(merged_overrides(overrides), escaped(by_section(changes)))
    head = (
        f"# Layout by --fit on {layouts.gpus} x {layouts.device.name}: modelled "
        f"{best.seconds:.2f} s per step,\n"
        f"# MFU {best.plan.mfu:.0%}, {best.plan.memory.total / GIB:.0f} GiB per GPU.\n"
        f"# Learning rates and batch are from the base: {config.optimizer.matrix.rule} at "
        f"{config.optimizer.matrix.lr:g}, {config.train.global_batch:,} sequences per step. For\n"
        "# another width, batch or number of tokens see docs/planning.md, Rates and batch.\n"
    )
    return f"{head}{as_yaml({'base': base})}\n{as_yaml(content)}"
