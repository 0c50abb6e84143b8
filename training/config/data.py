"""The sections of a run config about data: training sets and their phases, validation and tasks."""

import re
from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Final, Literal

from pydantic import Field

from models.section import AtLeast0, Check, Count, Positive, Section, Whole, named

URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(?=/)|hf:")
VARIABLE: Final = re.compile(r"\$(\w+)")


def local_path(key: str, path: str | None) -> Check:
    """Check that the path in `key`, which may be null, is local and needs no expansion."""
    path = path or ""
    if URL.match(path):
        rule = (
            "must be a local path, as no object store or hub is read or written: mount the "
            "store and set the path of the mounted folder, or copy the files"
        )
        return key, True, rule
    variable = VARIABLE.search(path)
    name = "HOME" if path.startswith("~") else variable[1] if variable else None
    rule = (
        f"must be written out, as ~ and $NAME are not expanded; write '${{oc.env:{name}}}' for "
        "the variable's value"
    )
    return key, name is not None, rule


BEGINNINGS = ("after_steps", "after_share", "with_decay")
"""Keys of a phase's beginning, exactly one of which is given."""


class DataPhase(Section):
    """A part of the run with its own weights of the sets, which ends where the next phase
    begins."""

    after_steps: Count | None = None
    """Steps of the run before the phase; null = another key sets the beginning."""
    after_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of `train.steps` before the phase, rounded to a step; null = another key sets the
    beginning."""
    with_decay: bool = False
    """Begin with the decay of `schedule.kind` wsd."""
    weights: Annotated[dict[str, Positive], Field(min_length=1)]
    """Weight of each set that the phase reads, by name in `data.train`; other sets are not read."""

    def checks(self) -> Iterator[Check]:
        """Check that exactly one key states when the phase begins."""
        keys = [key for key in BEGINNINGS if getattr(self, key)]
        rule = (
            f"or after_share or with_decay must be given, exactly one of the three, got {len(keys)}"
        )
        yield "after_steps", len(keys) != 1, rule

    @property
    def beginning(self) -> str:
        """The key of the phase's beginning."""
        return next(key for key in BEGINNINGS if getattr(self, key))


# Set names become parts of metric names.
SET_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class TrainSet(Section):
    """One training set of the blend."""

    path: str
    """Prefix of the set's `.bin` and `.idx` files."""
    weight: AtLeast0 = 1.0
    """Weight of this set in the blend, relative to the other sets' weights; 0 for a set that only
    later phases read."""

    def checks(self) -> Iterator[Check]:
        """Check the path of the set."""
        yield local_path("path", self.path)


class ValidationSet(Section):
    """One validation set, evaluated and logged under its name."""

    path: str
    """Prefix of the set's `.bin` and `.idx` files."""

    def checks(self) -> Iterator[Check]:
        """Check the path of the set."""
        yield local_path("path", self.path)


class DataConfig(Section):
    """Token sets of the run."""

    tokenizer: str | None = None
    """A tokenizer.json or Hugging Face tokenizer folder; null = the tokenizer of the data manifest.
    """
    mock: bool = False
    """Generate random tokens instead of reading files. Documents have 1,024 tokens on average. Sets
    keep their names and weights; without sets, there is one set, `mock`."""
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Background processes per rank that read samples; 0 reads in the training process."""
    verify: Literal["none", "sample", "full"] = "sample"
    """Parts of the sets to check against the manifest's hashes. none: nothing; sample: the
    tokenizer, the index, 64 blocks of tokens, and every other block at its first use; full:
    everything at each start. In any case, ranks compare their tokenizers, manifests and tokens; of
    sets over 256 MiB they compare 64 blocks of 4 KiB."""
    document_mask: bool = False
    """Keep attention within the documents of the sets' indexes, and count positions from a
    document's first token in the sequence; false attends to all documents of a sequence. Validation
    does the same."""
    first_token_loss: bool = True
    """Count the loss of a document's first token, which is predicted from the end of another
    document; false leaves this loss out of training and validation."""
    train: dict[str, TrainSet] = field(default_factory=dict)
    """Training sets by name; at least one, unless `mock` is true. `replace: true` in section `data`
    removes the base's section; `NAME: null` removes one set. All sets must use one tokenizer."""
    phases: tuple[DataPhase, ...] = ()
    """Later parts of the run with other weights of the sets, such as `[{after_share: 0.8, weights:
    {web: 1, books: 3}}]`; [] uses the weights of `train` throughout. Each set continues after the
    last token that was read."""
    validation: dict[str, ValidationSet] = field(default_factory=dict)
    """Validation sets by name; the name is part of the metrics, such as `val/<name>/loss`. `NAME:
    null` removes a set, as in `train`."""
    made_by: str | None = None
    """Command that creates the sets, and its cost; shown if a file of the sets is missing."""

    def checks(self) -> Iterator[Check]:
        """Check that there are sets, their names, and the path of the tokenizer."""
        yield local_path("tokenizer", self.tokenizer)
        yield "train", not (self.train or self.mock), "must name at least one set, got none"
        for kind in ("train", "validation"):
            for name in getattr(self, kind):
                rule = f"must name sets by letters, digits, '_', '-' and '.', got {name!r}"
                yield kind, not SET_NAME.fullmatch(name), rule
        yield from self._weight_checks()

    def _weight_checks(self) -> Iterator[Check]:
        """Check that phases read existing sets, and that every set is read."""
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
        yield "train", empty, "must have at least one weight above 0 at the start, got only 0"


class ValidationConfig(Section):
    """Interval and size of validation."""

    interval: Whole = 0
    """Steps between validations; the run always validates after the last step. 0 validates only
    then."""
    samples: Count | None = None
    """Sequences of each set per validation; null = the whole set."""
    samples_interval: Whole = 0
    """Steps between samples of text: greedy continuations of each validation set's first tokens, in
    metrics.jsonl and on the run's page. 0 writes none."""
    samples_tokens: Count = 32
    """Tokens of a continuation; each token costs a forward pass of one sequence per set."""

    @staticmethod
    def prompt_tokens(sequence_length: int) -> int:
        """Return the number of tokens in the prompt of a sample of text."""
        return min(16, sequence_length // 2)


class TasksConfig(Section):
    """Multiple-choice tasks that score the model during training."""

    files: dict[str, str] = field(default_factory=dict)
    """Task files by name; the name is part of the metrics, such as `task/<name>/acc`. Each line is
    `{"context": "...", "choices": ["...", "..."], "answer": 0}`; scripts/prepare_task.py creates
    it. `NAME: null` removes a task of the base, as in `data.train`."""
    interval: Whole = 0
    """Steps between scorings; the run always scores after the last step. 0 scores only then."""
    examples: Count | None = None
    """Number of examples to score per file, starting with the first; null = all."""

    def checks(self) -> Iterator[Check]:
        """Check the names, and the paths of the files."""
        for name, path in self.files.items():
            rule = f"must name tasks by letters, digits, '_', '-' and '.', got {name!r}"
            yield "files", not SET_NAME.fullmatch(name), rule
            _, wrong, rule = local_path("files", path)
            yield "files", wrong, f"{rule}, got {path!r} for {name}"
