"""What a run would be, without running it: model, routing, tokens, FLOPs and memory as text."""

from collections.abc import Iterable, Sequence

from models.size import all_units, model_size
from parallel.planner import Memory, memory_per_rank
from parallel.routing import Route
from training.config import Config
from training.run import DTYPES, config_assignments, config_routes, unit_options


def describe(config: Config, world_size: int) -> str:
    """Tables of the model, of every unit's routing, and of tokens, FLOPs and memory per rank."""
    size = model_size(config.model, config.train.sequence_length)
    sections = [
        heading("model") + model_table(config),
        heading("routing") + routing_table(config_routes(config)),
        heading("run") + run_table(config, world_size, size.flops_per_token),
        heading("memory per rank (GiB)") + memory_table(memory(config)),
    ]
    return "\n\n".join(sections)


def heading(text: str) -> str:
    """A section's first line."""
    return f"== {text}\n"


def model_table(config: Config) -> str:
    """Units, shape and parameters of each role, and the total."""
    units = all_units(config.model, **unit_options(config))
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
    """One row per unit: what updates it, how fast, on which sphere."""
    header = ("unit", "shape", "rule", "lr", "decay", "radius", "scale", "owner")
    rows = [
        (
            row.unit,
            "x".join(map(str, row.shape)),
            row.rule,
            f"{row.lr:.3g}",
            f"{row.weight_decay:.3g}",
            "" if row.radius is None else f"{row.radius:.4f}",
            "" if row.scale is None else f"{row.scale:.4f}",
            row.owner,
        )
        for row in routes
    ]
    return table(header, rows)


def run_table(config: Config, world_size: int, flops_per_token: float) -> str:
    """Layout, batch, tokens and FLOPs."""
    train, parallel = config.train, config.parallel
    data_size = world_size // parallel.model_ranks
    tokens = train.global_batch * train.sequence_length
    rows = [
        ("ranks", f"{world_size:,}"),
        ("data x tensor x pipeline", f"{data_size} x {parallel.tensor} x {parallel.pipeline}"),
        ("micro-batches per step", f"{train.global_batch // (train.micro_batch * data_size):,}"),
        ("tokens per step", f"{tokens:,}"),
        ("tokens", f"{tokens * train.steps:,}"),
        ("FLOPs per token", f"{flops_per_token:.4g}"),
        ("FLOPs", f"{flops_per_token * tokens * train.steps:.4g}"),
    ]
    return table(("", ""), rows)


def memory(config: Config) -> Memory:
    """Memory of the rank that needs most."""
    return memory_per_rank(
        config.model,
        config_assignments(config),
        dtype=DTYPES[config.train.precision],
        tensor=config.parallel.tensor,
        pipeline=config.parallel.pipeline,
        virtual_pipeline=config.parallel.virtual_pipeline,
        sequence_parallel=config.parallel.sequence_parallel,
        micro_batch=config.train.micro_batch,
        sequence_length=config.train.sequence_length,
        **unit_options(config),
    )


def memory_table(estimate: Memory) -> str:
    """Kinds of memory and their sum; activations are an estimate."""
    rows = [
        ("weights", estimate.weights),
        ("gradients", estimate.gradients),
        ("optimizer", estimate.optimizer),
        ("activations (estimate)", estimate.activations),
        ("total", estimate.total),
    ]
    return table(("", ""), [(name, f"{size / 2**30:.3f}") for name, size in rows])


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Left-aligned columns; an empty header is left out."""
    cells = [[str(cell) for cell in row] for row in rows]
    if any(header):
        cells.insert(0, list(header))
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)
