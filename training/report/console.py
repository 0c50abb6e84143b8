"""Console output of a run: opening lines, a line per logged step, and commands to run next."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from models.families import model_size
from models.huggingface.architectures import InexpressibleError
from models.huggingface.config_json import architecture
from parallel.disk import free_name
from spectral.batching import grouped
from training.config import Config
from training.config.checks import roles_of
from training.config.optimizer_section import group_of, groups_of
from training.errors import printable
from training.report.text import duration, short


def start_line(config: Config) -> str:
    """Return the first console line: the run's name and folder, and instructions to stop the run.
    The line is printed before torch is imported."""
    folder = config.run.dir
    stop = quote(f"{folder}/STOP")
    how = "saves and stops"
    if config.checkpoint.interval == 0:
        how = "stops without saving, because checkpoint.interval is 0"
    return f"{config.run.name} in {folder}: Ctrl-C or `touch {stop}` {how}"


def opening(config: Config, ranks: int) -> Iterator[str]:
    """Yield console lines on the model, layout, tokens and update rules. With several validation
    sets, a line is added if `val/loss` weights these sets equally. The vocabulary size must be set
    in `config`."""
    train, optimizer = config.train, config.optimizer
    size = model_size(config.model, train.sequence_length)
    model = f"{config.model.family} with {short(size.parameters)} parameters"
    if size.active_parameters < size.parameters:
        model += f", {short(size.active_parameters)} of them active"
    lengths = ", then ".join(
        f"{each.steps:,} steps of {each.batch * train.sequence_length:,} tokens"
        for each in train.equal_steps()
    )
    total = short(train.samples() * train.sequence_length)
    early = f"; train.exit_step ends the run after step {train.last:,}" if train.exits_early else ""
    yield f"{model}, on {layout(config, ranks)}; {lengths}, {total} in total{early}"
    names = {"matrix": "matrices", "scalar": "gains"}
    if config.model.tie_embeddings:
        names["embedding"] = "tied embedding and head"
    groups = {names.get(g, g): getattr(optimizer, g) for g in groups_of(config.model)}
    for role in dict.fromkeys([*roles_of(config), *optimizer.roles]):
        if optimizer.settings_for(role) != getattr(optimizer, group_of(role)):
            groups[role] = optimizer.settings_for(role)
    rules = grouped(groups, lambda name: (groups[name].rule, groups[name].lr))
    parts = [f"{rule} at {lr:g} for {', '.join(names)}" for (rule, lr), names in rules.items()]
    yield "; ".join(parts)
    weights = {name: each.weight for name, each in config.data.train.items()}
    unmatched = [name for name in config.data.validation if not weights.get(name)]
    if unmatched and len(config.data.validation) > 1:
        yield (
            f"val/loss weights all validation sets equally, because {unmatched[0]} is not a "
            "training set with a positive weight"
        )


def layout(config: Config, ranks: int) -> str:
    """Return a text that states the number of ranks and all parallel sizes above 1."""
    parallel = config.parallel
    sizes = {
        "data": ranks // (parallel.model_ranks),
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
        "virtual pipeline": parallel.virtual_pipeline,
        "context": parallel.context,
        "expert": parallel.expert,
        "expert tensor": parallel.expert_tensor,
    }
    axes = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return f"{ranks} ranks ({', '.join(axes)})" if axes else "1 rank"


_CONSOLE: tuple[tuple[str, Callable[[float], str | None]], ...] = (
    ("train/loss", lambda v: f"loss {v:.4f}"),
    ("lr/matrix", lambda v: f"lr {v:.2e}"),
    ("optim/grad_norm", lambda v: f"grad {v:.3g}"),
    ("perf/tokens_per_sec", lambda v: f"{v:,.0f} tok/s"),
    ("perf/step_time_s", lambda v: f"{1000 * v:.0f} ms"),
    ("perf/mfu", lambda v: f"mfu {v:.1f}%"),
    ("progress/eta_s", lambda v: f"eta {duration(v)}"),
    ("optim/skipped_steps", lambda v: f"skipped {v:.0f}" if v else None),
)


def console_line(
    metrics: Mapping[str, float | int | str | None], *, step: int, total_steps: int
) -> str:
    """Format a line with the step and all known values among loss, lr, grad norm, tokens/s, ms, MFU
    and ETA."""
    width = len(str(total_steps))
    parts = [f"step {step:>{width}}/{total_steps}"]
    for name, form in _CONSOLE:
        value = metrics.get(name)
        text = form(value) if isinstance(value, int | float) else None
        if text is not None:
            parts.append(text)
    return " | ".join(parts)


def next_commands(config: Config) -> Iterator[str]:
    """Yield shell commands that the user can run next on the finished run."""
    folder = quote(config.run.dir)
    yield f"python scripts/plot.py {folder} --html"
    if config.checkpoint.interval == 0:
        return
    options = " --no-tokenizer" if config.data.mock else ""
    try:
        architecture(config.model)
    except InexpressibleError:
        options = " --format consolidated"
    else:
        if not config.data.mock:
            yield f'python scripts/generate.py {folder} "In the beginning"'
    target = quote(str(free_name(Path("exported", config.run.name))))
    yield f"python scripts/convert_hf.py export {folder} {target}{options}"


def validation_lines(metrics: Mapping[str, Any], step: int, tasks: Iterable[str]) -> Iterator[str]:
    """Yield lines on the validation losses and task scores in `metrics`."""
    losses = [
        f"{name.split('/')[1]} {value:.4f}"
        for name, value in metrics.items()
        if name.startswith("val/") and name.count("/") == 2 and name.endswith("/loss")
    ]
    if len(losses) > 1:
        losses.append(f"mean {metrics['val/loss']:.4f}")
    if losses:
        yield f"step {step} validation loss: {', '.join(losses)}"
    scores = [
        f"{name} {metrics[f'task/{name}/acc']:.4f} ({metrics[f'task/{name}/acc_norm']:.4f})"
        for name in tasks
        if f"task/{name}/acc" in metrics
    ]
    if scores:
        yield f"step {step} tasks, acc (acc_norm): {', '.join(scores)}"


def sample_lines(metrics: dict[str, object]) -> Iterator[str]:
    """Yield one line per text sample, with the name of the set, the end of the prompt and the
    continuation."""
    for key, text in metrics.items():
        if key.startswith("sample/") and key.endswith("/text"):
            name = key.split("/")[1]
            prompt = _one_line(metrics[f"sample/{name}/prompt"])
            yield f"sample {name}: ...{prompt[-40:]} | {_one_line(text)[:160]}"


def _one_line(text: object) -> str:
    return printable(" ".join(str(text).split()))
