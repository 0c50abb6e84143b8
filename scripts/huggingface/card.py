"""The model card (README.md) of an exported model."""

from collections.abc import Iterator
from dataclasses import asdict, replace

from models.families import model_size
from training.checkpoint.checkpoints import FOLDER
from training.checkpoint.stored_checkpoint import CheckpointInfo
from training.config import Config
from training.config.optimizer_section import groups_of
from training.report.log_lines import read_metrics

HEADER = """---
library_name: transformers
pipeline_tag: text-generation
tags: [spectrain]
---
"""


def card(
    info: CheckpointInfo, *, name: str, architecture: str, dtype: str, tokenizer: bool = True
) -> str:
    """Return the text of README.md. `tokenizer` is True if the folder contains a tokenizer."""
    config = info.config
    separated = (
        "Documents are separated as in the source model."
        if info.imported
        else "Each document ends with the end-of-sequence token; there is no beginning-of-sequence "
        "token."
    )
    classes = ["AutoModelForCausalLM", "AutoTokenizer"][: 1 + tokenizer]
    loaded = f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n' if tokenizer else ""
    none = "" if tokenizer else "The folder contains no tokenizer. "
    rows = "".join(f"| {key} | {value} |\n" for key, value in _facts(info, config, dtype))
    losses = "".join(f"| {key} | {value:.4f} |\n" for key, value in validation(info).items())
    measured = f"\n| validation | nats per token |\n|---|---|\n{losses}" if losses else ""
    return (
        f"{HEADER}\n# {name}\n\n"
        f"A `{architecture}` pretrained with Spectrain, run `{config.run.name}`, "
        f"step {info.step:,} of {config.train.steps:,}. It is a base model, not tuned to follow "
        f"instructions. {none}{separated}\n\n| | |\n|---|---|\n{rows}{measured}\n"
        f"```python\nfrom transformers import {', '.join(classes)}\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n{loaded}```\n'
    )


def _facts(info: CheckpointInfo, config: Config, dtype: str) -> Iterator[tuple[str, str]]:
    exported = replace(config.model, vocab_multiple=1)  # without vocabulary padding
    size = model_size(exported, config.train.sequence_length)
    yield "parameters", f"{size.parameters:,}"
    if size.active_parameters != size.parameters:
        yield "active per token", f"{size.active_parameters:,}"
    yield "weights", dtype
    if info.imported:
        yield "source", f"imported from {info.meta['source']}, without further training"
        return
    train = config.train
    if (averaged := info.meta.get("averaged")) is not None:
        steps = zip(averaged["steps"], averaged["weights"], strict=True)
        yield "mean of", ", ".join(f"step {step:,} times {weight:.4g}" for step, weight in steps)
    yield "tokens", f"{info.meta['progress']['tokens']:,}"
    ramp = "".join(f"{stage}, then " for stage in train.batch_ramp)
    yield "batch", f"{ramp}{train.global_batch} sequences of {train.sequence_length} tokens"
    yield "precision", train.precision
    for group in groups_of(config.model):
        each = getattr(config.optimizer, group)
        yield f"{group} weights", f"{each.rule}, lr {each.lr:g}, weight decay {each.weight_decay:g}"
    for role, section in config.optimizer.roles.items():
        settings = {key: value for key, value in asdict(section).items() if value is not None}
        yield f"{role} weights", ", ".join(f"{key} {value}" for key, value in settings.items())
    if origin := info.meta.get("initialized_from"):
        yield "initialized from", f"step {origin['step']:,} of {origin['path']}"
    schedule = asdict(config.schedule)
    yield "schedule", ", ".join(f"{k} {v}" for k, v in schedule.items() if v is not None)
    if config.pc is None:
        yield "PC layers", "none"
    else:
        kind = config.pc.polynomial.kind
        level = f"level {config.pc.level}" if kind == "preset" else kind
        yield "PC layers", f"merged into the weights, {level}"
    weights = {name: each.weight for name, each in config.data.train.items()}
    total = sum(weights.values())
    yield "data", ", ".join(f"{name} {w / total:.1%}" for name, w in weights.items() if w)
    for phase, start in zip(config.data.phases, config.phase_starts(), strict=True):
        total, parts = sum(phase.weights.values()), phase.weights.items()
        shares = ", ".join(f"{name} {weight / total:.1%}" for name, weight in parts)
        yield f"data after step {start:,}", shares
    yield "seed", str(config.seed)
    versions = info.meta.get("versions", {})
    yield "software", ", ".join(f"{k} {v}" for k, v in versions.items() if v is not None)


def validation(info: CheckpointInfo) -> dict[str, float]:
    """Return the last validation loss logged for each set up to the checkpoint's step.

    The dict is empty if the checkpoint is not in a run folder.
    """
    losses_by_set: dict[str, float] = {}
    run = info.path.parent.parent
    if info.path.parent.name != FOLDER or not (run / "metrics.jsonl").exists():
        return losses_by_set
    for metrics in read_metrics(run):
        losses = {
            key.removeprefix("val/").removesuffix("/loss"): value
            for key, value in metrics.items()
            if key.startswith("val/") and key.endswith("/loss") and key != "val/loss"
        }
        if losses and metrics.get("step", 0) <= info.step:
            losses_by_set = losses
    return losses_by_set
