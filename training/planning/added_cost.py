"""Estimate the time that monitors and task evaluation add to a run.

A monitored step computes the singular values of every weight, runs matmuls for all other metrics,
and accumulates sums during the forward and backward passes. If `monitors.interval` is null, an
interval that adds at most 1% to the run time is chosen.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch

from models.families import all_units
from models.units import Unit
from parallel.plan.devices import EIGEN_ROW, device_called, product_seconds
from parallel.plan.planner import Plan
from parallel.plan.step_shape import StepShape
from spectral.batching import grouped
from spectral.measures import POLAR_STEPS, TOP_STEPS
from training.assignments import unit_options
from training.config import Config
from training.data.build_data import build_tasks
from training.dry_run import gpu_hours, plan_run, step_shape
from training.errors import InputError
from training.evaluation import lengths
from training.monitor.monitors import DEFAULT_INTERVAL, LayerSampling

SHARE: Final = 0.01
"""If `monitors.interval` is null, monitors may add at most this fraction to the run time."""
WIDE: Final = 8
"""Bytes per float64."""
SCORE_BYTES: Final = 18
"""Bytes moved per attention score to write, scale and mask it and to take the maximum."""
SIZE_BYTES: Final = 130
"""Bytes moved per layer and element of the residual stream, to measure the stream four times per
layer."""
LAUNCHES: Final = 300
"""Number of kernel launches per matrix with all groups of metrics enabled."""


@dataclass(frozen=True)
class MonitorCost:
    """Cost of a run's monitors.

    interval   steps between monitored steps; 0 if monitors are disabled
    seconds    estimated overhead of a monitored step in seconds; None on a CPU
    step       estimated time in seconds of a step without monitors
    """

    interval: int
    seconds: float | None = None
    step: float = 0.0

    @property
    def share(self) -> float:
        """Overhead of the monitors, as a fraction of the run time without them."""
        return (self.seconds or 0.0) / (self.interval * self.step) if self.interval else 0.0

    def as_dict(self) -> dict[str, float | None]:
        """Return the cost as the values to write to JSON."""
        return {"interval": self.interval, "seconds": self.seconds, "share": self.share}

    def up_to(self, last: int) -> str:
        """Describe the cost for a run that ends after step `last`."""
        if self.interval > last:
            return (
                f"no step is monitored: the first would be {self.interval:,}, and the run ends "
                f"after step {last:,}"
            )
        return str(self)

    def __str__(self) -> str:
        if not self.interval:
            return "off"
        every = f"every {self.interval:,} steps"
        if self.seconds is None:
            return f"{every}; a monitored step takes about twice as long as other steps"
        return (
            f"{every}, which adds {self.share:.1%} to the run's time (modelled: a monitored step "
            f"takes {self.seconds:.3g} s longer than other steps, which take {self.step:.3g} s)"
        )


def monitor_cost(config: Config, ranks: int, device: torch.device) -> MonitorCost:
    """Return the cost of a run's monitors on `ranks` devices of the same type as `device`.

    If the planner does not support the GPU type, the cost is computed for `plan.device`.
    """
    interval = config.monitors.interval
    if interval == 0 or device.type != "cuda":
        return MonitorCost(DEFAULT_INTERVAL if interval is None else interval)
    kind = device_called(torch.cuda.get_device_name(device))
    return planned_cost(config, plan_run(config, ranks, kind))


def run_hours(config: Config, planned: Plan) -> float:
    """Return the GPU-hours of a planned run, including its monitors."""
    cost = planned_cost(config, planned)
    monitored = config.train.last // cost.interval if cost.interval else 0
    seconds = monitored * (cost.seconds or 0.0)
    return gpu_hours(config, planned) + seconds * planned.gpus / 3600


def planned_cost(config: Config, planned: Plan) -> MonitorCost:
    """Return the cost of a planned run's monitors. If `monitors.interval` is null, an interval is
    chosen."""
    interval, step = config.monitors.interval, planned.time.total
    if interval == 0:
        return MonitorCost(0)
    seconds = monitored_seconds(config, step_shape(config, planned.gpus, planned.device))
    if interval is None:
        needed = math.ceil(seconds / (SHARE * step) / DEFAULT_INTERVAL)
        interval = DEFAULT_INTERVAL * max(1, needed)
    return MonitorCost(interval, seconds, step)


def monitored_seconds(config: Config, shape: StepShape) -> float:
    """Return the estimated overhead of a monitored step on the busiest rank, in seconds."""
    groups, ranks = config.monitors.groups, shape.inputs.stage_ranks * shape.inputs.pipeline
    units = [u for u in all_units(config.model, **unit_options(config)) if u.is_matrix]
    rounds = LayerSampling(config, DEFAULT_INTERVAL).rounds
    inspected = [inspection_seconds(config, shape, unit, rounds) for unit in units]
    if "weights" in groups:
        matrices = grouped(units, lambda unit: (unit.parameter, unit.role)).values()
        for parts in matrices:
            if len(parts) > 1:
                rows, cols = sum(unit.shape[0] for unit in parts), parts[0].shape[1]
                short, long = min(rows, cols), max(rows, cols)
                gram = product_seconds(shape.device, "fp64", short, long, short)
                inspected.append(gram + EIGEN_ROW * short)
    # Each matrix is inspected by a single rank, so the busiest rank may inspect one matrix more
    # than the mean.
    seconds = sum(inspected) / ranks + max(inspected) * (1 - 1 / ranks)
    if "activations" in groups:
        seconds += input_seconds(shape, units) / rounds
    if "attention" in groups:
        seconds += score_seconds(shape)
    return seconds


def inspection_seconds(config: Config, shape: StepShape, unit: Unit, rounds: int) -> float:
    """Return the time in seconds to compute the metrics of one matrix `[rows, cols]`."""
    device, groups = shape.device, config.monitors.groups
    rows, cols = unit.shape
    short, long = min(rows, cols), max(rows, cols)
    gram = product_seconds(device, "fp64", short, long, short)

    def top(size: int) -> float:
        return 2 * TOP_STEPS * WIDE * size**2 / device.copy_rate

    seconds = LAUNCHES * device.launch_seconds
    if "weights" in groups:
        seconds += (1 + (config.pc is not None)) * (gram + EIGEN_ROW * short)
    if "spectra" in groups:
        seconds += 2 * (gram + EIGEN_ROW * short)
    if "gradients" in groups:
        step = 2 * product_seconds(device, "fp32", short, long, short)
        step += product_seconds(device, "fp32", short, short, short)
        seconds += gram + top(short) + POLAR_STEPS * step
    if "updates" in groups:
        seconds += gram + top(short)
    if "activations" in groups:
        outputs = 2 * product_seconds(device, "fp64", rows, cols, cols) + top(short)
        gated = unit.role.endswith(("gate", "up"))
        seconds += (top(cols) + gated * outputs) / rounds
    return seconds


def input_seconds(shape: StepShape, units: list[Unit]) -> float:
    """Return the time in seconds per step to compute the Gram matrices of all inputs and to measure
    the residual stream."""
    inputs, tokens = shape.inputs, shape.tokens * shape.microbatches
    widths = {unit.parameter: unit.axes[-1] for unit in units if unit.role != "embedding"}
    products = sum(
        product_seconds(shape.device, "fp32", cols / inputs.tensor, tokens, cols)
        for cols in widths.values()
    )
    elements = tokens * shape.model.hidden * shape.model.layers
    return (products + SIZE_BYTES * elements / shape.device.copy_rate) / inputs.pipeline


def score_seconds(shape: StepShape) -> float:
    """Return the time in seconds per step to find the largest attention scores, which are computed
    in float32."""
    model, inputs, device = shape.model, shape.inputs, shape.device
    heads = model.heads // inputs.tensor * model.layers / inputs.pipeline
    pairs = shape.tokens * shape.microbatches * shape.sequence_length / 2
    flops = 2 * pairs * model.head_size / (device.efficiency * device.peak["fp32"])
    return heads * (flops + SCORE_BYTES * pairs / device.copy_rate)


def task_cost(config: Config, planned: Plan) -> str | None:
    """Describe the cost of evaluating the config's tasks, or the reason why the cost is unknown.
    Returns None if there are no tasks."""
    section, train = config.tasks, config.train
    if not section.files:
        return None
    try:
        tasks = build_tasks(config)
    except InputError as error:
        return f"of unknown cost: {error}"
    steps = lengths(config.parallel.layout, train.sequence_length)
    sequences = [len(request.tokens) - 1 for task in tasks for request in task.requests]
    tokens = sum(next(step for step in steps if step >= length) for length in sequences)
    step_tokens = train.global_batch * train.sequence_length
    seconds = planned.time.forward * tokens / step_tokens
    times = 1 + (train.last - 1) // section.interval if section.interval else 1
    share = times * seconds * planned.gpus / (3600 * gpu_hours(config, planned))
    repeated = 0 < section.interval < train.last
    often = f"every {section.interval:,} steps" if repeated else "after the last step"
    return (
        f"{', '.join(section.files)}, {often}: {len(sequences):,} sequences, {tokens:,} tokens in "
        f"all, {seconds:.3g} s (modelled), which adds {share:.1%} to the run's time"
    )
