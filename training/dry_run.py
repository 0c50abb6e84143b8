"""Dry run: model, routing, tokens, FLOPs and the plan of a run, as tables."""

from collections.abc import Callable, Mapping, Sequence

from models.size import ModelSize, model_size
from parallel.optimizer.cost import penalty_cost
from parallel.optimizer.routing import Route
from parallel.plan.inputs import PlanInputs
from parallel.plan.memory import Memory
from parallel.plan.monitor_memory import MonitorInputs
from parallel.plan.planner import Plan, StagePlan, plan
from parallel.plan.volume import PENALTY_KINDS
from training.assignments import unit_options
from training.build import DTYPES, config_assignments, config_routes, config_units
from training.config import Config
from training.monitor.monitors import LayerSampling, steps_compared
from training.report.metrics import peak_flops
from training.report.table import table

DEVICE = "NVIDIA H100 80GB HBM3"
"""Device whose peak FLOP/s the plan assumes."""


def plan_run(config: Config, world_size: int) -> Plan:
    """Return the plan of `config` on `world_size` ranks."""
    train, parallel = config.train, config.parallel
    distributed = config.optimizer.distributed
    dtype = DTYPES[train.precision]
    exchange_dtype = DTYPES[distributed.exchange_dtype or config.train.precision]
    tokens = train.global_batch * train.sequence_length
    device_flops = peak_flops(DEVICE)
    assert device_flops is not None  # the table has it
    return plan(
        config.model,
        config_assignments(config),
        PlanInputs(
            data=world_size // (parallel.tensor * parallel.pipeline),
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            virtual_pipeline=parallel.virtual_pipeline,
            expert=parallel.expert,
            expert_tensor=parallel.expert_tensor,
            first_stage_layers=parallel.first_stage_layers,
            last_stage_layers=parallel.last_stage_layers,
            recompute=train.recompute,
            loss_chunk=train.loss_chunk,
            sequence_parallel=parallel.sequence_parallel,
            dtype=dtype,
            exchange_bytes=exchange_dtype.itemsize,
            storage=distributed.storage,
            placement=distributed.placement,
            bucket_numel=distributed.bucket_elements,
            step_groups=distributed.step_groups,
            monitored=monitor_inputs(config, world_size // parallel.model_ranks),
            penalised=config.gram_penalty is not None,
        ),
        micro_batch=train.micro_batch,
        sequence_length=train.sequence_length // parallel.context,
        step_flops=model_size(config.model, train.sequence_length).flops_per_token * tokens,
        peak_flops=device_flops,
        **unit_options(config),
    )


def monitor_inputs(config: Config, data: int) -> MonitorInputs | None:
    """Return what monitors and the choice of rules measure on one of `data` data-parallel ranks."""
    train, chosen = config.train, config.monitors
    groups = set(chosen.groups) if chosen.interval else set()
    auto = config.optimizer.auto_rule is not None
    if not groups and not auto:
        return None
    noise = "noise" in groups
    microbatches = train.global_batch // (train.micro_batch * data)
    return MonitorInputs(
        weights=steps_compared(chosen) if groups else 0,
        gradients="gradients" in groups,
        inputs=auto or "activations" in groups,
        sampling_rounds=LayerSampling(config).rounds,
        samples=min(chosen.noise_samples, microbatches) if noise else 0,
    )


def describe(config: Config, planned: Plan) -> str:
    """Return tables of model, routing of every unit, tokens and FLOPs, and the plan."""
    size = model_size(config.model, config.train.sequence_length)
    sections = [
        heading("model") + model_table(config),
        heading("routing") + routing_table(config_routes(config)),
        *penalty_section(config),
        heading("run") + run_table(config, planned.gpus, size),
        heading("optimizer, per pipeline stage") + stage_table(planned.stages),
        heading("bytes sent per step (MiB), by the rank that sends most")
        + traffic_table(planned.stages),
        heading("time") + time_table(planned),
        heading("memory per rank (GiB)") + memory_table(planned.memory),
    ]
    return "\n\n".join(sections)


def heading(text: str) -> str:
    """Return the first line of a section."""
    return f"== {text}\n"


def model_table(config: Config) -> str:
    """Return units, shape and parameters of each role, and the total."""
    units = config_units(config)
    roles = dict.fromkeys(unit.role for unit in units)
    rows = []
    for role in roles:
        mine = [unit for unit in units if unit.role == role]
        shapes = {unit.shape for unit in mine}
        shape = " or ".join("x".join(map(str, s)) for s in sorted(shapes))
        rows.append((role, len(mine), shape, f"{sum(unit.numel for unit in mine):,}"))
    total = sum(unit.numel for unit in units)
    rows.append(("total", len(units), "", f"{total:,}"))
    return table(("role", "units", "shape", "parameters"), rows)


def routing_table(routes: Sequence[Route]) -> str:
    """Return a row per unit: rule, learning rate, radius, scale and owner."""
    header = ("unit", "shape", "rule", "lr", "decay", "radius", "scale", "pc", "penalty", "owner")
    rows = [
        (
            row.unit,
            "x".join(map(str, row.shape)),
            row.rule,
            f"{row.lr:.3g}",
            f"{row.weight_decay:.3g}",
            "" if row.radius is None else f"{row.radius:.4f}",
            "" if row.scale is None else f"{row.scale:.4f}",
            row.pc or "",
            "" if row.penalty is None else f"{row.penalty:g}",
            row.owner,
        )
        for row in routes
    ]
    return table(header, rows)


def penalty_section(config: Config) -> list[str]:
    """Return the section about the Gram penalty, no section without one."""
    section = config.gram_penalty
    if section is None:
        return []
    units = [unit for unit in config_units(config) if unit.role in section.roles]
    counts = {role: sum(unit.role == role for unit in units) for role in section.roles}
    gram = "W^T W" if section.side == "in" else "W W^T"
    norm = f"||OffDiag({gram})||_F" + ("^2" if section.power == 2 else "")
    divided = {
        None: "",
        "frobenius": ", the squared norm over ||W||_F^4",
        "size": ", the squared norm over n (n - 1)",
    }
    steps, adaptive = section.last_step(config.train.steps), section.adaptive
    active = f"in steps 1 to {steps} of {config.train.steps}"
    if section.schedule == "adaptive":
        on, off = adaptive.bounds
        active += f", switched by {adaptive.measure} every {adaptive.interval} steps"
        active += f", on above {on:g}, off below {off:g}"
    flops = sum(penalty_cost(unit.shape) for unit in units)
    rows = [
        ("units", ", ".join(f"{count:,} {role}" for role, count in counts.items())),
        ("of each", f"{section.coefficient:g} {norm}{divided[section.normalize]}"),
        ("active", active),
        ("FLOPs per active step", f"{flops:.4g}"),
    ]
    return [heading("Gram penalty") + table(("", ""), rows)]


def run_table(config: Config, world_size: int, size: ModelSize) -> str:
    """Return parameters, layout, batch, tokens and FLOPs."""
    train, parallel = config.train, config.parallel
    data_size = world_size // parallel.model_ranks
    tokens = train.global_batch * train.sequence_length
    rows = [
        ("parameters", f"{size.parameters:,}"),
        ("active parameters per token", f"{size.active_parameters:,}"),
        ("ranks", f"{world_size:,}"),
        ("data x tensor x pipeline", f"{data_size} x {parallel.tensor} x {parallel.pipeline}"),
        *_expert_row(config, world_size),
        ("micro-batches per step", f"{train.global_batch // (train.micro_batch * data_size):,}"),
        ("tokens per step", f"{tokens:,}"),
        ("tokens", f"{tokens * train.steps:,}"),
        ("FLOPs per token", f"{size.flops_per_token:.4g}"),
        ("FLOPs", f"{size.flops_per_token * tokens * train.steps:.4g}"),
    ]
    return table(("", ""), rows)


def _expert_row(config: Config, world_size: int) -> list[tuple[str, str]]:
    """Return the row with the parallel sizes of routed experts, none without experts."""
    parallel = config.parallel
    if config.model.moe is None:
        return []
    copies = world_size // (parallel.pipeline * parallel.expert * parallel.expert_tensor)
    sizes = f"{copies} x {parallel.expert} x {parallel.expert_tensor}"
    return [("copies x expert x expert tensor", sizes)]


def stage_table(stages: Sequence[StagePlan]) -> str:
    """Return layout and placement, a column per pipeline stage."""
    return by_stage(
        stages,
        {
            "parameters per rank": lambda stage: f"{stage.parameters:,}",
            "buckets": lambda stage: stage.buckets,
            "of these aligned to matrices": lambda stage: stage.owner_buckets,
            "padding": lambda stage: f"{stage.padding / stage.parameters:.3%}",
            "matrices with an owner": lambda stage: f"{stage.units:,}",
            "mean load, in largest matrices": lambda stage: f"{stage.units_per_rank:.2f}",
            "placement": lambda stage: stage.strategy if stage.units else "",
            "largest load (GFLOP)": lambda stage: f"{stage.load_max / 1e9:,.1f}",
            "largest / mean load": lambda stage: f"{stage.imbalance:.3f}",
            "largest / best possible": lambda stage: (
                f"{stage.load_max / stage.load_bound:.3f}" if stage.units else ""
            ),
            "largest / mean state": lambda stage: f"{stage.state_max / stage.state_mean:.4f}",
        },
    )


def traffic_table(stages: Sequence[StagePlan]) -> str:
    """Return bytes by kind of communication, a column per pipeline stage."""

    def sent(kind: str) -> Callable[[StagePlan], object]:
        return lambda stage: f"{stage.sent[kind] / 2**20:,.1f}"

    kinds = {k: sent(k) for k in stages[0].sent if any(stage.sent[k] for stage in stages)}
    penalty = {kind: kinds.pop(kind) for kind in PENALTY_KINDS if kind in kinds}
    if penalty:
        penalty["all, with the Gram penalty active"] = lambda stage: (
            f"{stage.sent_penalised / 2**20:,.1f}"
        )
    return by_stage(
        stages,
        {
            **kinds,
            "all": lambda stage: f"{stage.sent_max / 2**20:,.1f}",
            "AdamW with ZeRO-1": lambda stage: f"{stage.sent_adamw / 2**20:,.1f}",
            "ratio": lambda stage: f"{stage.sent_ratio:.4f}",
            **penalty,
        },
    )


def by_stage(
    stages: Sequence[StagePlan], figures: Mapping[str, Callable[[StagePlan], object]]
) -> str:
    """Return a row per figure and a column per pipeline stage."""
    header = ("stage", *(stage.stage for stage in stages)) if len(stages) > 1 else ("", "")
    return table(
        header, [(name, *(figure(stage) for stage in stages)) for name, figure in figures.items()]
    )


def time_table(planned: Plan) -> str:
    """Return times of a step at the peak of one device."""
    model = planned.model_flops / planned.peak_flops
    rows = [
        (f"forward and backward at peak of {DEVICE} (s)", f"{model:.4g}"),
        ("optimizer's matrices, busiest rank, at peak (s)", f"{planned.optimizer_seconds:.4g}"),
        ("optimizer's share of the step", f"{planned.optimizer_share:.2%}"),
    ]
    return table(("", ""), rows)


def memory_table(estimate: Memory) -> str:
    """Return kinds of memory and their sum on the rank with most of it."""
    rows = [
        ("weights", estimate.weights),
        ("gradients", estimate.gradients),
        ("master weights", estimate.master),
        ("optimizer state", estimate.state),
        ("activations (estimate)", estimate.activations),
        ("optimizer buffers (estimate)", estimate.buffers),
        ("a monitored step (estimate)", estimate.monitors),
        ("total", estimate.total),
    ]
    if estimate.penalty:
        name = "Gram penalty buffers, before the optimizer's (estimate)"
        rows.insert(-2, (name, estimate.penalty))
    return table(("", ""), [(name, f"{size / 2**30:.3f}") for name, size in rows])
