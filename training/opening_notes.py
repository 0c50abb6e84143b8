"""Notes at the start of a run, as (kind, text) pairs. Rank 0 prints them and writes them to
events.jsonl."""

from collections.abc import Iterator, Mapping
from typing import Any

from training.checkpoint.changes import announced
from training.checkpoint.initial_weights import InitialWeights, rescaling_warning
from training.checkpoint.stored_checkpoint import CheckpointInfo
from training.config.effects import without_effect
from training.data.build_data import data_vocabulary, unverified_sets
from training.data.manifest import shared_text
from training.machine.backends import (
    compile_backend,
    fused_backward,
    fused_loss,
    slow_attention,
    slow_precision,
)
from training.machine.device import device_line
from training.step import Trainer
from training.step_profile import announcement

Note = tuple[str, str]


def weight_notes(
    weights: InitialWeights,
    rescaled: Mapping[str, tuple[str, float]],
    facts: Mapping[str, Any],
) -> Iterator[Note]:
    """Yield notes on the initial weights of a new run. `facts` is the result of `run_facts`. See
    `DistributedOptimizer.rescalings` for `rescaled`."""
    yield "initialized", f"initial weights: step {weights.info.step} of {weights.info.path}"
    if (warning := rescaling_warning(rescaled.values())) is not None:
        yield "warning", f"warning: checkpoint.initialize_from: {warning}"
    data_sha256 = facts["identity"]["tokenizer"]["sha256"]
    if None in (data_sha256, weights.info.tokenizer_sha256):
        owner = "the data" if data_sha256 is None else "the weights"
        text = f"the tokenizer of {owner} is unknown, so token ids may have different meanings"
        yield "warning", f"warning: checkpoint.initialize_from: {text}"


def resume_notes(
    trainer: Trainer, start: CheckpointInfo, facts: Mapping[str, Any]
) -> Iterator[Note]:
    """Yield notes on changes since the checkpoint `start`. `facts` is the result of `run_facts`."""
    for text in announced(start, trainer.config, facts["identity"], facts):
        yield "changed", f"changed since step {start.step}: {text}"
    done, train = trainer.progress, trainer.config.train
    total = done.tokens + train.samples(done.step, done.tokens) * train.sequence_length
    if total != train.samples() * train.sequence_length:  # which is printed at startup
        before = f"{done.tokens:,} of them before step {done.step + 1:,}"
        yield "changed", f"tokens: {total:,} in total, {before}"
    phase, sets = done.phase, trainer.present.sets
    if not 0 < phase.sample == done.sample:
        return
    counts = ", ".join(f"{each.name} {phase.tokens(each.name):,}" for each in sets)
    where = f"new mixture from sample {phase.sample:,} on; tokens read so far"
    yield "changed", f"data: {where}: {counts}"
    named = {each.content: name for name, each in phase.read.items() if each.tokens}
    for new in sets:
        if not phase.tokens(new.name) and new.digest in named:
            same = f"{new.name} has the same content as {named[new.digest]}"
            yield "changed", f"data: {same}, so its windows are read again"


def data_notes(trainer: Trainer) -> Iterator[Note]:
    """Yield notes on the training and validation sets, the vocabulary and the tasks."""
    config = trainer.config
    for text in shared_text(config.data):
        yield "warning", f"warning: {text}"
    validation = [each.set for each in trainer.validation]
    sets = {"train": trainer.data.all_sets, "validation": validation}
    unverified = unverified_sets(config.data, sets)
    if unverified is not None:
        yield "data", f"data: {unverified}"
    ids = data_vocabulary(config)
    if ids is not None and ids != config.model.vocab_size:
        yield "vocabulary", f"vocabulary: {config.model.vocab_size:,} ids, {ids:,} in the data"
    wanted, held_out = config.validation.samples or 0, trainer.validation
    if short := [f"{each.name} ({each.samples:,})" for each in held_out if each.samples < wanted]:
        text = f"validation.samples = {wanted:,}, but there are fewer sequences: {', '.join(short)}"
        yield "validation", text
    for task in trainer.tasks:
        yield "tasks", str(task)


def settings_notes(trainer: Trainer) -> Iterator[Note]:
    """Yield notes on settings that have no effect, and on the profile."""
    for text in without_effect(trainer.config):
        yield "warning", f"warning: {text}"
    profile = announcement(trainer.config, trainer.progress.step)
    if profile is not None:
        yield "profile", profile


def kernel_notes(trainer: Trainer, attention: str | None) -> Iterator[Note]:
    """Yield notes on the device and its kernels. `attention` is the attention kernel, or None on
    CPU."""
    config, device = trainer.config, trainer.groups.device
    train = config.train
    yield "device", f"device: {device_line(device)}"
    slow = slow_precision(train.precision, device)
    if slow is not None:
        yield "precision", f"precision: {slow}"
    if fused_loss(config, device):
        yield "loss", "loss kernels: liger-kernel"
    elif device.type == "cuda" and train.fused_loss == "auto" and train.loss_chunk is None:
        yield "loss", "loss kernels: megatron-core (slower; liger-kernel is not installed)"
    if fused_backward(config, device):
        yield "backward", "backward kernels: spectrain (not yet benchmarked on GPUs)"
    backend, described_backend = compile_backend(config, device)
    if backend is not None or device.type == "cuda":
        yield "compile", f"torch.compile backend: {described_backend}"
    if attention is not None:
        slow = slow_attention(attention, device)
        yield "attention", f"attention kernel: {attention}{f'; {slow}' if slow else ''}"
