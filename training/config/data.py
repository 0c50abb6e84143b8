"""Config sections about data: training sets and their phases, validation sets and tasks."""

import re
from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from models.section import AtLeast0, Check, Count, Positive, Section, Whole, named
from training.local_path import local_path

BEGINNINGS = ("after_steps", "after_share", "with_decay")
"""Keys that set where a phase begins; each phase has exactly one of these keys."""


class DataPhase(Section):
    """A later part of the run with other weights of the training sets. A phase ends where the next
    phase begins."""

    after_steps: Count | None = None
    """Number of steps before the phase; null = another key sets where the phase begins."""
    after_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of `train.steps` before the phase, rounded to a step; null = another key sets where
    the phase begins."""
    with_decay: bool = False
    """Begin the phase when the decay of a wsd schedule begins."""
    weights: Annotated[dict[str, Positive], Field(min_length=1)]
    """Weight of each set, by name in `data.train`; sets that are not listed are not read."""

    def checks(self) -> Iterator[Check]:
        """Check that exactly one key sets where the phase begins."""
        keys = [key for key in BEGINNINGS if getattr(self, key)]
        rule = (
            f"or after_share or with_decay must be set, exactly one of the three, got {len(keys)}"
        )
        yield "after_steps", len(keys) != 1, rule

    @property
    def beginning(self) -> str:
        """The key that sets where the phase begins."""
        return next(key for key in BEGINNINGS if getattr(self, key))


def name_check(key: str, name: str) -> Check:
    """Check a name in the section `key`, which becomes a part of metric names."""
    rule = f"must use only letters, digits, '_', '-' and '.' in names, got {name!r}"
    return key, not re.fullmatch(r"[A-Za-z0-9_.-]+", name), rule


class TokenFiles(Section):
    """The files of a set."""

    path: str
    """Prefix of the set's `.bin` and `.idx` files."""

    def checks(self) -> Iterator[Check]:
        """Check the path of the set."""
        yield local_path("path", self.path)


class TrainSet(TokenFiles):
    """One training set of the blend."""

    weight: AtLeast0 = 1.0
    """Weight of the set in the blend, relative to the weights of the other sets; 0 for a set that
    only later phases read."""


class ValidationSet(TokenFiles):
    """One validation set, evaluated and logged under its name."""


class DataConfig(Section):
    """Token sets of the run."""

    tokenizer: str | None = None
    """Path of a tokenizer.json or of a Hugging Face tokenizer folder; null = the tokenizer in the
    data manifest."""
    mock: bool = False
    """Generate random tokens, in documents of 1,024 tokens on average, instead of reading files.
    The sets keep their names and weights; a config without sets gets one set, `mock`."""
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Background processes per rank that read samples; 0 reads in the training process."""
    verify: Literal["none", "sample", "full"] = "sample"
    """Data to compare with the hashes in the manifest. none: no data; sample: the tokenizer, the
    index, 64 blocks of tokens, and every other block at its first use; full: all data at each
    start. In all cases, tokenizers, manifests and token files must be identical on all ranks;
    for a set over 256 MiB, ranks compare only 64 blocks of 4 KiB."""
    document_mask: bool = False
    """Restrict attention to tokens of the same document, and restart positions at the first token
    of each document in a sequence, in training and validation; false attends across documents."""
    first_token_loss: bool = True
    """Include the loss of each document's first token, which is predicted from another document;
    false excludes this loss from training and validation."""
    train: dict[str, TrainSet] = field(default_factory=dict)
    """Training sets by name; at least one, unless `mock` is true. All sets must use the same
    tokenizer. `NAME: null` removes a set of the base; `replace: true` in section `data` removes the
    whole section of the base."""
    phases: tuple[DataPhase, ...] = ()
    """Later parts of the run with different weights of the sets, such as `[{after_share: 0.8,
    weights: {web: 1, books: 3}}]`; [] uses the weights of `train` for the whole run. In a new
    phase, each set continues after the last token read from it."""
    validation: dict[str, ValidationSet] = field(default_factory=dict)
    """Validation sets by name; metrics contain the name, as in `val/<name>/loss`. `NAME: null`
    removes a set of the base."""
    made_by: str | None = None
    """Command that creates the sets, with its cost; printed if a set's file is missing."""

    def checks(self) -> Iterator[Check]:
        """Check the names and weights of the sets, and the path of the tokenizer."""
        yield local_path("tokenizer", self.tokenizer)
        yield "train", not (self.train or self.mock), "must contain at least one set, got none"
        for kind in ("train", "validation"):
            for name in getattr(self, kind):
                yield name_check(kind, name)
        yield from self._weight_checks()

    def _weight_checks(self) -> Iterator[Check]:
        """Check that phases name existing sets, and that every set is read."""
        later_sets = {name for phase in self.phases for name in phase.weights}
        for i, phase in enumerate(self.phases):
            for name in phase.weights.keys() - self.train.keys():
                sets = named(name, self.train) if self.train else f"sets of train, got {name!r}"
                yield f"phases[{i}].weights", True, f"must name {sets}"
        place = " here or in a phase" if self.phases else ""
        for name, each in self.train.items():
            unread = each.weight == 0 and name not in later_sets
            yield f"train.{name}.weight", unread, f"must be above 0{place}, got 0"
        empty = self.train and not any(each.weight for each in self.train.values())
        yield "train", empty, "must contain a set whose weight is above 0, got only weights of 0"


class ValidationConfig(Section):
    """Interval and size of validation."""

    interval: Whole = 0
    """Steps between validations; 0 = only the validation after the last step, which always runs."""
    samples: Count | None = None
    """Number of sequences of each set per validation; null = the whole set."""
    samples_interval: Whole = 0
    """Steps between samples of text, written to metrics.jsonl and shown in report.html. A sample
    continues the first tokens of a validation set by greedy decoding. 0 disables samples."""
    samples_tokens: Count = 32
    """Number of tokens generated per sample; each token costs a forward pass on one sequence of
    every set."""

    @staticmethod
    def prompt_tokens(sequence_length: int) -> int:
        """Return the number of prompt tokens of a sample of text."""
        return min(16, sequence_length // 2)


class TasksConfig(Section):
    """Multiple-choice tasks that score the model during training."""

    files: dict[str, str] = field(default_factory=dict)
    """Paths of task files by name; metrics contain the name, as in `task/<name>/acc`. Each line of
    a file is `{"context": "...", "choices": ["...", "..."], "answer": 0}`. scripts/prepare_task.py
    creates such files. `NAME: null` removes a task of the base."""
    interval: Whole = 0
    """Steps between evaluations of the tasks; 0 = only the evaluation after the last step, which
    always runs."""
    examples: Count | None = None
    """Number of examples to score, from the start of each file; null = all examples."""

    def checks(self) -> Iterator[Check]:
        """Check the names and paths of the files."""
        for name, path in self.files.items():
            yield name_check("files", name)
            _, wrong, rule = local_path("files", path)
            yield "files", wrong, f"{rule}, got {path!r} for {name}"
