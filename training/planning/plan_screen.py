"""Format the plan of a run as text, with one row per kind of unit."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod
from typing import Any, Final

from models.families import model_size
from parallel.optimizer.routing import Route
from parallel.plan.devices import GIB, RESERVE
from parallel.plan.planner import Plan, element_state_bytes, pc_bytes, state_of_matrix
from parallel.plan.step_time import rule_seconds
from spectral.batching import grouped
from spectral.rules import RULES
from training.assignments import config_assignments, config_routes, config_units
from training.checkpoint.checkpoints import superseded
from training.config import Config
from training.dry_run import attended_length, batch_seconds, data_table, documents_known, step_shape
from training.machine.backends import DTYPES
from training.planning.added_cost import planned_cost, run_hours, task_cost
from training.report.console import layout
from training.report.text import table

SHOWN_STAGES: Final = 8
"""With at most this number of pipeline stages, each stage has a column. With more stages, only the
first, the heaviest and the last stage have columns."""
SMALL: Final = 0.005
"""Kinds of traffic that make up less than this fraction of the bytes sent by a rank are merged into
one row."""

UNEVEN: Final = 0.01
"""The plan reports the wait for the busiest rank if the wait exceeds this fraction of the step
time."""
UNCOUNTED: Final = "FLOPs of rule {}, which has no `cost`; a rehearsal (--rehearse) counts them"
"""Note on work that the modelled times do not include."""


def describe(config: Config, planned: Plan) -> str:
    """Format a plan: units, sizes, memory, traffic, time, and a verdict on whether the run fits."""
    several = len(config.data.train) > 1 or config.data.phases
    sections = {
        "units": unit_table(config_routes(config)),
        "run": run_table(config, planned),
        **({"data": data_table(config)} if several else {}),
        "memory per rank (GiB)": memory_table(planned),
        "sent per step (MiB), on the rank that sends the most": traffic_table(planned),
        "balance: maximum over ranks divided by the mean": balance_table(planned),
        "step, modelled": time_table(config, planned),
        "verdict": verdict(planned),
    }
    return "\n".join(f"== {heading}\n{text}" for heading, text in sections.items())


def run_table(config: Config, planned: Plan) -> str:
    """Return a table of layout, batch, tokens and FLOPs."""
    train, parallel = config.train, config.parallel
    length = attended_length(config)
    size = model_size(config.model, length)
    microbatches = train.global_batch // (train.micro_batch * planned.data // parallel.context)
    total = train.samples(until=train.last) * train.sequence_length
    ramp = []
    *stages, _ = batch_seconds(config, planned)
    for i, (each, seconds) in enumerate(stages):
        text = f"{each.batch} sequences in the {each.steps:,} steps after step {each.first:,}, "
        ramp.append(("" if i else "batch ramp", f"{text}{seconds:.4g} s each"))
    rows = [
        ("parameters", f"{size.parameters:,}, {size.active_parameters:,} per token"),
        ("device", f"{planned.device.name}, {layout(config, planned.gpus)}"),
        (
            "batch",
            f"{train.global_batch} sequences of {train.sequence_length}: {microbatches} "
            f"micro-batches of {train.micro_batch} per rank, {planned.tokens:,} tokens",
        ),
        *ramp,
        (
            "whole run",
            f"{train.last:,} steps, {total:,} tokens, {size.flops_per_token:.4g} FLOPs per token, "
            f"{size.flops_per_token * total:.4g} in all",
        ),
        ("checkpoints", checkpoints_text(config)),
    ]
    if train.exits_early:
        text = (
            f"after step {train.last:,} of {train.steps:,} (train.exit_step): tokens, FLOPs, times "
            "and checkpoints are those of the steps up to there"
        )
        rows.insert(-1, ("early end", text))
    if config.data.document_mask:
        whose = (
            "lengths of the training sets" if documents_known(config) else "lengths of mock tokens"
        )
        text = f"attention costs as much as if all documents had {length:,.0f} tokens ({whose})"
        rows.append(("documents", text))
    return table(("", ""), rows)


MEMORY: Final = {
    "weights": "weights",
    "gradients": "gradients",
    "master": "master weights",
    "state": "optimizer state",
    "activations": "activations (estimate)",
    "buffers": "optimizer buffers (estimate)",
    "total": "total",
}
"""Label for each kind of memory."""


def memory_table(planned: Plan) -> str:
    """Return a table of memory, with a row per kind, a row for the total and a column per pipeline
    stage."""
    sizes = [asdict(each.memory) | {"total": each.memory.total} for each in planned.stages]
    kinds = [kind for kind in MEMORY if any(each[kind] for each in sizes)]
    return by_stage(planned, {MEMORY[k]: [f"{s[k] / GIB:.2f}" for s in sizes] for k in kinds})


def traffic_table(planned: Plan) -> str:
    """Return a table of the MiB sent, with a row per kind of communication and a column per
    pipeline stage."""
    sent = [{each.kind: each.size for each in stage.traffic} for stage in planned.stages]
    totals = [sum(sizes.values()) for sizes in sent]
    large = {
        kind: None
        for kind in dict.fromkeys(kind for sizes in sent for kind in sizes)
        if any(n.get(kind, 0) > SMALL * total for n, total in zip(sent, totals, strict=True))
    }
    rows = {kind: [sizes.get(kind, 0) for sizes in sent] for kind in large}
    if any(sizes.keys() - large for sizes in sent):
        rows["other kinds"] = [sum(n for k, n in sizes.items() if k not in large) for sizes in sent]
    rows["all"] = totals
    rows["all to other nodes"] = [
        sum(each.size * each.across for each in stage.traffic) for stage in planned.stages
    ]
    texts = {name: [f"{size / 2**20:,.1f}" for size in sizes] for name, sizes in rows.items()}
    ratios = [f"{stage.sent_ratio:.4f}" for stage in planned.stages]
    return by_stage(planned, texts | {"optimizer traffic / AdamW's with ZeRO-1": ratios})


def balance_table(planned: Plan) -> str:
    """Return a table of the imbalance of work and of state across ranks, with a column per pipeline
    stage."""
    stages = planned.stages
    rows = {
        "load of the rules": [f"{each.imbalance:.3f}" for each in stages],
        "masters and state": [f"{s.state_max / max(1, s.state_mean):.3f}" for s in stages],
    }
    return by_stage(planned, rows, header=False)


def by_stage(planned: Plan, rows: Mapping[str, Sequence[str]], *, header: bool = True) -> str:
    """Return a table with a row per quantity and a column per pipeline stage. The heaviest stage is
    marked."""
    count, heaviest = len(planned.stages), planned.heaviest.stage
    shown = range(count) if count <= SHOWN_STAGES else sorted({0, heaviest, count - 1})
    names = [f"{stage}{'*' * (stage == heaviest)}" for stage in shown]
    top = ("stage (* needs the most)", *names) if count > 1 and header else [""] * (len(shown) + 1)
    return table(top, [(name, *(texts[i] for i in shown)) for name, texts in rows.items()])


def time_table(config: Config, planned: Plan) -> str:
    """Return a table of the modelled step time and its breakdown, and of the total time of the
    run."""
    time = planned.time
    parts = {
        "forward and backward": time.forward + time.backward,
        "recomputation": time.recompute,
        "sending activations": time.activations,
        "pipeline bubble": time.bubble,
        "gradients and weights not overlapped": time.gradients + time.weights,
        "exchange": time.exchange,
        "optimizer": time.optimizer,
    }
    shown = ", ".join(f"{name} {seconds:.3g}" for name, seconds in parts.items() if seconds > 0)
    shape = step_shape(config, planned.gpus, planned.device)
    busiest = max(planned.stages, key=lambda stage: stage.load_max)
    wait = rule_seconds(shape, busiest.load_max - busiest.load_mean)
    share = wait / time.total
    uneven = (
        f"ranks wait {wait:.3g} s ({share:.1%} of the step) for the busiest rank, which has "
        f"{busiest.imbalance:.2f} times the mean load, because matrices are not divided"
    )
    hours = run_hours(config, planned)
    names = sorted({route.rule for route in config_routes(config)})
    uncounted = [name for name in names if not RULES[name].costs_are_counted()]
    rows = [
        ("seconds", f"{time.total:.4g}: {shown}"),
        (
            "rate",
            f"{planned.tokens_per_second:,.0f} tokens/s, MFU {planned.mfu:.1%} of "
            f"{planned.peak_flops / 1e12:,.0f} TFLOP/s",
        ),
        *([("uneven", uneven)] if share > UNEVEN else []),
        ("monitors", planned_cost(config, planned).up_to(config.train.last)),
        *(("tasks", text) for text in [task_cost(config, planned)] if text is not None),
        (
            "time of the run",
            f"{hours / planned.gpus / 24:.2f} days, {hours:,.0f} GPU-hours (modelled, see "
            "docs/planning.md; modelled times differ from published runs by up to 25%)",
        ),
        *(("not counted", UNCOUNTED.format(name)) for name in uncounted),
    ]
    return table(("", ""), rows)


def verdict(planned: Plan) -> str:
    """Return a message stating whether all stages fit their devices."""
    room = f"{planned.device.room / GIB:.1f} GiB ({planned.device.memory_bytes / GIB:g} less"
    room += f" {RESERVE:.0%} reserve)"
    heaviest = planned.heaviest
    needed = f"{heaviest.memory.total / GIB:.1f} GiB"
    where = f" on stage {heaviest.stage}" if planned.pipeline > 1 else ""
    if planned.fits:
        return f"fits: at most {needed} of {room} are needed{where}"
    over = [stage.stage for stage in planned.stages if stage.memory.total > planned.device.room]
    stages = f" on stages {', '.join(map(str, over))}" if planned.pipeline > 1 else ""
    return f"DOES NOT FIT{stages}: needs {needed}{where}, has {room}"


FIGURES: Final = {
    "lr": ".3g", "weight_decay": ".3g", "radius": ".4g", "scale": ".4g", "pc": "", "penalty": "g",
}  # fmt: skip
"""Maps the fields of `Route` that the plan shows to their formats."""


def unit_table(routes: Sequence[Route]) -> str:
    """Return a table of all units. Units with the same role, shape, rule and `FIGURES` share a row.

    For each role, rows are sorted by descending number of units.
    """

    def kind(route: Route) -> tuple[Any, ...]:
        shape = route.shape if len(route.shape) > 1 else ()  # all vectors share a row
        values = {name: getattr(route, name) for name in FIGURES}
        figures = ("" if v is None else format(v, FIGURES[name]) for name, v in values.items())
        return route.role, shape, route.rule, *figures

    groups = grouped(routes, kind)
    roles = list(dict.fromkeys(route.role for route in routes))
    ordered = sorted(groups.items(), key=lambda item: (roles.index(item[0][0]), -len(item[1])))
    rows = [(*units(group), *key[2:]) for key, group in ordered]
    _, number, _, elements = units(routes)
    rows.append(("total", number, "", elements, *[""] * (1 + len(FIGURES))))
    header = (
        "units", "number", "shape", "parameters", "rule", "lr", "decay", "radius", "scale", "pc",
        "penalty",
    )  # fmt: skip
    used = [i for i, name in enumerate(header) if any(row[i] for row in rows)]
    return table([header[i] for i in used], [[row[i] for i in used] for row in rows])


def units(routes: Sequence[Route]) -> tuple[str, str, str, str]:
    """Return the table cells for the units of one role: the role and its layers, the number of
    units, their shapes, and the total number of elements."""
    shapes = sorted({route.shape for route in routes})
    ends = dict.fromkeys("x".join(map(str, shape)) for shape in (shapes[0], shapes[-1]))
    elements = sum(prod(route.shape) for route in routes)
    parts = [route.unit.split(".") for route in routes]
    layers = [int(each[1]) for each in parts if each[0] == "layers"]
    role = routes[0].role
    where = f"{role}, layers {min(layers)} to {max(layers)}" if layers else role
    return where, f"{len(routes):,}", " to ".join(ends), f"{elements:,}"


def checkpoint_bytes(config: Config) -> int:
    """Return the number of bytes of the tensors in a checkpoint: float32 weights and the optimizer
    state."""
    assign = config_assignments(config)
    momentum_bytes = DTYPES[config.optimizer.distributed.momentum_dtype or "fp32"].itemsize
    total = 0
    for unit in config_units(config):
        assigned = assign(unit)
        weight = 4 * prod(unit.shape)
        if assigned.pc is not None:
            total += pc_bytes(assigned, unit.shape, momentum_bytes)
        elif assigned.whole_matrix:
            state = state_of_matrix(assigned.rule, unit.shape, momentum_bytes)
            total += weight + sum(state.values())
        else:
            total += weight + element_state_bytes(assigned.rule) * prod(unit.shape)
    return total


def checkpoints_text(config: Config) -> str:
    """Describe a run's checkpoints: size, interval, number and disk space."""
    section, steps = config.checkpoint, config.train.last
    if section.interval == 0:
        return "none: checkpoint.interval is 0"
    size = checkpoint_bytes(config) / 1e9
    saved = [*range(section.interval, steps, section.interval), steps]
    number = len(saved) - len(superseded(saved, section.keep_last, section.keep_every))
    return (
        f"{size:.3g} GB each, every {section.interval:,} steps; {number:,} checkpoints are kept "
        f"and need {number * size:.3g} GB, plus {size:.3g} GB during a save"
    )
