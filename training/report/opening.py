"""The first and the last lines of a run: what it is, how to stop it, and what to do next."""

from collections.abc import Iterator
from shlex import quote

from models.families import model_size
from spectral.batching import grouped
from training.config import Config
from training.config.optimizer import groups_of
from training.errors import printable


def first_line(config: Config) -> str:
    """Return what is known before anything is loaded: name, folder, how to stop."""
    folder = config.run.dir
    stop = quote(f"{folder}/STOP")
    return f"{config.run.name} in {folder}: Ctrl-C or `touch {stop}` saves and stops"


def opening(config: Config, ranks: int) -> Iterator[str]:
    """Yield the lines about model, layout, tokens and rules of a config with a vocabulary."""
    train, optimizer = config.train, config.optimizer
    size = model_size(config.model, train.sequence_length)
    model = f"{config.model.family} of {short(size.parameters)} parameters"
    if size.active_parameters < size.parameters:
        model += f", {short(size.active_parameters)} of them active"
    lengths = ", then ".join(
        f"{each.steps:,} steps of {each.batch * train.sequence_length:,} tokens"
        for each in train.equal_steps()
    )
    total = short(train.samples() * train.sequence_length)
    yield f"{model}, on {layout(config, ranks)}; {lengths}, {total} in all"
    names = {"matrix": "matrices", "scalar": "gains"}
    if config.model.tie_embeddings:
        names["embedding"] = "embedding and head, which are one"
    groups = {names.get(g, g): getattr(optimizer, g) for g in groups_of(config.model)}
    rules = grouped(groups, lambda name: (groups[name].rule, groups[name].lr))
    parts = [f"{rule} at {lr:g} for {', '.join(names)}" for (rule, lr), names in rules.items()]
    yield "; ".join(parts)


def layout(config: Config, ranks: int) -> str:
    """Return the number of ranks, and each axis of parallelism that has more than one."""
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


def short(count: float) -> str:
    """Return a count with three digits and a unit: 1.84M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def next_commands(config: Config) -> Iterator[str]:
    """Yield what can be done with a finished run, a command each."""
    folder, target = quote(config.run.dir), quote(f"exported/{config.run.name}")
    yield f"python scripts/plot.py {folder} --html"
    if config.checkpoint.interval > 0:
        yield f'python scripts/generate.py {folder} "In the beginning"'
        yield f"python scripts/convert_hf.py export {folder} {target}"


def sample_lines(metrics: dict[str, object]) -> Iterator[str]:
    """Yield a line for each sample of text: its set, the end of the prompt, and how it goes on."""
    for key, text in metrics.items():
        if key.startswith("sample/") and key.endswith("/text"):
            name = key.split("/")[1]
            prompt = _one_line(metrics[f"sample/{name}/prompt"])
            yield f"sample {name}: ...{prompt[-40:]} | {_one_line(text)[:160]}"


def _one_line(text: object) -> str:
    return printable(" ".join(str(text).split()))
