"""Data sections of the config: training sets, data phases, validation sets and tasks."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Annotated, Final, Literal

from pydantic import Field

from models.section import AtLeast0, Check, Count, Positive, Section, Whole, one_of
from training.local_path import local_path

MEASURED: Final = re.compile(
    r"data\.(validation\..*|document_mask|first_token_loss)|train\.sequence_length"
    r"|validation\.samples"
)
"""Keys that the validation loss depends on, besides model, tokenizer and `mean_weights`."""


def mean_weights(names: Iterable[str], mixture: Mapping[str, float]) -> dict[str, float]:
    """Return the weights of validation sets in `val/loss` and `val/bpb`, which add up to 1.

    `mixture` contains the weights of the training sets. Each validation set has the weight of the
    training set of the same name. If any of these training sets is missing or has weight 0, all
    validation sets count equally.
    """
    sets = list(names)
    named = all(mixture.get(name) for name in sets)
    weights = {name: mixture[name] if named else 1.0 for name in sets}
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def rounded_mean_weights(names: Iterable[str], mixture: Mapping[str, float]) -> dict[str, float]:
    """Return `mean_weights`, rounded so that the weights of two runs can be compared."""
    return {name: round(weight, 6) for name, weight in mean_weights(names, mixture).items()}


MEAN: Final = "weights of the validation sets in the mean"
"""Reason why the validation losses of two runs are not comparable: `mean_weights` differ."""

BEGINNINGS = ("after_steps", "after_share", "with_decay")
"""Keys that define the start of a phase; each phase sets exactly one of them."""


class DataPhase(Section):
    """A later phase of the run, with different weights for the training sets. A phase ends when the
    next one starts."""

    after_steps: Count | None = None
    """Start the phase after this many steps; null = another key defines the start."""
    after_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Start the phase after this fraction of `train.steps`, rounded to a step; null = another key
    defines the start."""
    with_decay: bool = False
    """Start the phase when a wsd schedule starts to decay."""
    weights: Annotated[dict[str, Positive], Field(min_length=1)]
    """Weight of each training set, by its name in `data.train`; unlisted sets are not read."""

    def checks(self) -> Iterator[Check]:
        """Check that exactly one key defines the start of the phase."""
        keys = [key for key in BEGINNINGS if getattr(self, key)]
        rule = (
            "or after_share or with_decay must be set, but only one of these keys, got "
            f"{len(keys)} keys"
        )
        yield "after_steps", len(keys) != 1, rule

    @property
    def beginning(self) -> str:
        """The key that defines the start of the phase."""
        return next(key for key in BEGINNINGS if getattr(self, key))


def name_check(key: str, name: str) -> Check:
    """Check a name in section `key`. The name becomes part of metric names."""
    rule = f"must use only letters, digits, '_', '-' and '.' in names, got {name!r}"
    return key, not re.fullmatch(r"[A-Za-z0-9_.-]+", name), rule


class TokenFiles(Section):
    """Files of a token set."""

    path: str
    """Path prefix of the token set's `.bin` and `.idx` files."""

    def checks(self) -> Iterator[Check]:
        """Check the path prefix."""
        yield local_path("path", self.path)


class TrainSet(TokenFiles):
    """A training set in the blend."""

    weight: AtLeast0 = 1.0
    """Weight of the training set in the blend, relative to the other training sets; 0 for a set
    used only in later phases."""


class ValidationSet(TokenFiles):
    """A validation set, evaluated and logged under its name."""


class DataConfig(Section):
    """Training and validation data."""

    tokenizer: str | None = None
    """Path to a tokenizer.json or a Hugging Face tokenizer folder; null = the tokenizer listed in
    the data manifest."""
    mock: bool = False
    """Train on random tokens, in documents of 1,024 tokens on average, instead of reading files.
    The training sets keep their names and weights; if none are configured, one named `mock` is
    used."""
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Number of data loading processes per rank; 0 = load samples in the training process."""
    verify: Literal["none", "sample", "full"] = "sample"
    """Data to verify against the hashes in the manifest. none: nothing; sample: the tokenizer, the
    index and 64 blocks of tokens at startup, all other blocks on first use; full: all data at
    startup. In any case, tokenizers, manifests and token files must match across ranks; for token
    sets over 256 MiB, ranks compare only 64 blocks of 4 KiB."""
    document_mask: bool = False
    """Mask attention across document boundaries and reset position ids at the start of each
    document, in training and validation; false = attend across documents."""
    first_token_loss: bool = True
    """Include the loss on each document's first token, which is predicted from the previous
    document; false masks this loss in training and validation."""
    train: dict[str, TrainSet] = field(default_factory=dict)
    """Token sets for training, by name; at least one is required unless `mock` is true. All token
    sets must use the same tokenizer. `NAME: null` removes a training set of the base config;
    `replace: true` in section `data` discards the base config's entire section."""
    phases: tuple[DataPhase, ...] = ()
    """Later phases of the run with different training set weights, such as `[{after_share: 0.8,
    weights: {web: 1, books: 3}}]`; [] = use the weights in `train` throughout. When a phase starts,
    each training set continues where it left off."""
    validation: dict[str, ValidationSet] = field(default_factory=dict)
    """Token sets for validation, by name; the name appears in metrics, as in `val/<name>/loss`.
    `NAME: null` removes a validation set of the base config."""
    made_by: str | None = None
    """Command that creates the token sets, and its cost; shown when files of a token set are
    missing."""

    def mean_weights(self) -> dict[str, float]:
        """Return `rounded_mean_weights` of the validation sets."""
        mixture = {name: each.weight for name, each in self.train.items()}
        return rounded_mean_weights(self.validation, mixture)

    def checks(self) -> Iterator[Check]:
        """Check the tokenizer path, the sets' names and weights, and that every set is read."""
        yield local_path("tokenizer", self.tokenizer)
        yield "train", not (self.train or self.mock), "must contain at least one set, got none"
        for kind in ("train", "validation"):
            for name in getattr(self, kind):
                yield name_check(kind, name)
        later_sets = {name for phase in self.phases for name in phase.weights}
        for i, phase in enumerate(self.phases):
            for name in phase.weights.keys() - self.train.keys():
                sets = one_of(name, self.train) if self.train else f"sets in train, got {name!r}"
                yield f"phases[{i}].weights", True, f"must name {sets}"
        where = " here or in a phase" if self.phases else ""
        for name, each in self.train.items():
            unread = each.weight == 0 and name not in later_sets
            yield f"train.{name}.weight", unread, f"must be above 0{where}, got 0"
        empty = self.train and not any(each.weight for each in self.train.values())
        yield "train", empty, "must contain a set with a weight above 0, got only weights of 0"


class ValidationConfig(Section):
    """Validation during training."""

    interval: Whole = 0
    """Number of steps between validations; validation also runs after the last step (0 = only
    then)."""
    samples: Count | None = None
    """Number of sequences to evaluate from each validation set; null = the whole set."""
    samples_interval: Whole = 0
    """Number of steps between text samples; samples are also generated after the last step. 0
    disables samples. A sample continues the first tokens of a validation set by greedy decoding.
    Samples are written to metrics.jsonl and shown in report.html."""
    samples_tokens: Count = 32
    """Number of tokens to generate per sample; each token costs a forward pass on one sequence per
    validation set."""

    @staticmethod
    def prompt_tokens(sequence_length: int) -> int:
        """Return the number of prompt tokens in a text sample."""
        return min(16, sequence_length // 2)


class TasksConfig(Section):
    """Multiple-choice tasks on which the model is evaluated during training."""

    files: dict[str, str] = field(default_factory=dict)
    """Paths of task files by name; the name appears in metrics, as in `task/<name>/acc`. Each line
    of a file is `{"context": "...", "choices": ["...", "..."], "answer": 0}`.
    scripts/prepare_task.py creates these files. `NAME: null` removes a task of the base config."""
    interval: Whole = 0
    """Number of steps between evaluations of the tasks; tasks are also evaluated after the last
    step (0 = only then)."""
    examples: Count | None = None
    """Number of examples to score per task, taken from the start of the task's file; null = all
    examples."""

    def checks(self) -> Iterator[Check]:
        """Check the tasks' names and file paths."""
        for name, path in self.files.items():
            yield name_check("files", name)
            yield local_path(f"files.{name}", path)
