"""Initial weights from another run: `checkpoint.initialize_from`."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from models.families import all_units
from models.units import Unit
from parallel.checkpoint.state_writer import first_rank
from parallel.model import ParallelModel, named_buffers
from training.assignments import unit_options
from training.checkpoint.changes import changes
from training.checkpoint.checkpoints import read_checkpoint
from training.checkpoint.identity import model_facts
from training.checkpoint.stored_checkpoint import (
    CONFIG,
    CheckpointInfo,
    CheckpointWeights,
    LastParameter,
    ResumeError,
)
from training.config import Config
from training.data.build_data import data_vocabulary, tokenizer_path
from training.errors import BrokenCheckpointError
from training.json_file import read_json

TOKENIZER = "tokenizer.json"
OFF_RADIUS = 0.05
"""Relative deviation from the radius above which the rescaling of a matrix is reported. The norms
of matrices trained with a sphere rule deviate less."""


class InitialWeights:
    """Units and buffers of a config's model, read from a checkpoint. The checkpoint may have been
    saved with a different layout and a different split into units."""

    def __init__(self, config: Config, weights: CheckpointWeights) -> None:
        self.weights = weights
        units = all_units(config.model, **unit_options(config))
        self._whole = {unit.name: unit for unit in units}
        self._last = LastParameter(weights.parameter)

    @property
    def info(self) -> CheckpointInfo:
        """The checkpoint that contains the weights."""
        return self.weights.info

    def unit(self, unit: Unit) -> Tensor:
        """Return the full float32 weight `[*shape]` of `unit`. The unit may belong to any rank."""
        return self._last.unit(self._whole[unit.name]).reshape(unit.shape)

    def fill_buffers_(self, model: ParallelModel) -> None:
        """Fill the module buffers of `model`."""
        with torch.no_grad():
            for name, value in named_buffers(model.chunks, model.parameters):
                value.copy_(self.weights.buffer(name, tuple(value.shape)))


def rescaling_warning(found: Collection[tuple[str, float]]) -> str | None:
    """Return a warning if the first step rescales initial weights to the radius of their update
    rule. `found` contains the rule name and the factor of each matrix that is rescaled."""
    changed = [(rule, factor) for rule, factor in found if abs(factor - 1) > OFF_RADIUS]
    if not changed:
        return None
    factors = [factor for _, factor in changed]
    rules = ", ".join(sorted({rule for rule, _ in changed}))
    return (
        f"the first step will rescale {len(changed)} matrices to their radius, by factors "
        f"{min(factors):.3g} to {max(factors):.3g} ({rules}); this changes a pretrained model: "
        "finetune with muon"
    )


def initial_weights(
    config: Config, tokenizer: str | None = None, file: Path | None = None
) -> InitialWeights | None:
    """Return the weights from `checkpoint.initialize_from`, or None if this setting is null.
    Collective.

    `file` is the data's tokenizer.json, and `tokenizer` is its sha256; both are None if unknown.
    Rank 0 chooses the checkpoint for all ranks, because the source run might be saving a newer
    checkpoint. Raises BrokenCheckpointError if the checkpoint cannot be read. Raises ResumeError if
    there is no checkpoint, or if the checkpoint's model or tokenizer does not match that of the
    run.
    """
    if config.checkpoint.initialize_from is None:
        return None
    info = first_rank(partial(chosen_weights, config, tokenizer, file))
    return InitialWeights(config, CheckpointWeights(info))


def chosen_weights(
    config: Config, tokenizer: str | None = None, file: Path | None = None
) -> CheckpointInfo:
    """Return the checkpoint at `checkpoint.initialize_from`, which must not be null.

    For arguments and errors, see `initial_weights`. Models are not compared if the vocabulary size
    is unknown.
    """
    assert config.checkpoint.initialize_from is not None
    try:
        info = read_checkpoint(config.checkpoint.initialize_from)
    except (BrokenCheckpointError, ResumeError) as error:
        raise type(error)(f"checkpoint.initialize_from: {error}") from None
    saved, configured = (
        model_facts(replace(each, init=config.model.init))
        for each in (info.config.model, config.model)
    )
    different = list(changes(saved, configured)) if config.model.vocab_size is not None else []
    if different:
        remedies = []
        others = [change for change in different if change.key != "vocab_size"]
        reason = unsuitable_data(config, info) if len(others) < len(different) else None
        if reason is not None:
            remedies.append(
                f"{reason}: prepare data with the model's tokenizer (scripts/prepare_data.py "
                f"--tokenizer {info.path / TOKENIZER}) and set data.train"
            )
        if reason is None or others:
            keys = "these" if reason is None else "the other"
            remedies.append(f"set {keys} model keys as in {info.path / CONFIG}")
        raise ResumeError(
            f"checkpoint.initialize_from: the model in {info.path} must match the run's model, but "
            f"these keys differ: {', '.join(map(str, different))}; {'; '.join(remedies)}"
        )
    sha256 = info.tokenizer_sha256
    known = None not in (sha256, tokenizer)
    another = known and sha256 != tokenizer and not same_tokens(info.path / TOKENIZER, file)
    if another and "tokenizer" not in config.checkpoint.allow_change:
        raise ResumeError(
            f"checkpoint.initialize_from: the tokenizer of {info.path} (sha256 {sha256}) differs "
            f"from the data's tokenizer ({tokenizer}), so token ids have different meanings. To "
            "use the weights anyway, set checkpoint.allow_change=[tokenizer]"
        )
    return info


def unsuitable_data(config: Config, info: CheckpointInfo) -> str | None:
    """Return why the data's tokenizer is incompatible with the checkpoint's model. Return None if
    the tokenizer is compatible or cannot be compared."""
    ids, rows = data_vocabulary(config), info.config.model.vocab_size
    if ids is not None and rows is not None and ids > rows:
        return f"the data's tokenizer has {ids:,} token ids, but the model has {rows:,}"
    saved, file = info.path / TOKENIZER, tokenizer_path(config)
    known = file is not None and file.is_file() and saved.is_file()
    if known and not same_tokens(saved, file):
        return "the data's tokenizer is not the model's tokenizer"
    return None


def same_tokens(saved_file: Path, data_file: Path | None) -> bool:
    """Return whether two tokenizer.json files are equal, ignoring `post_processor`: neither data
    preparation nor exports use it."""
    if data_file is None or not (saved_file.is_file() and data_file.is_file()):
        return False
    first, second = (
        {**read_json(path), "post_processor": None} for path in (saved_file, data_file)
    )
    return bool(first == second)
