"""The data section of a run config: which tokens the run reads."""

import re
from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from models.section import Check, Positive, Section

# Set names become parts of metric names.
SET_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class TrainSet(Section):
    """One training set of the blend."""

    path: str
    """Prefix of the set's `.bin` and `.idx` files."""
    weight: Positive = 1.0
    """Weight of this set in the blend, relative to the other sets' weights."""


class ValidationSet(Section):
    """One validation set, evaluated and logged under its name."""

    path: str
    """Prefix of the set's `.bin` and `.idx` files."""


class DataConfig(Section):
    """Which tokens the run reads."""

    tokenizer: str | None = None
    """A tokenizer.json or Hugging Face tokenizer folder; null takes the data manifest's."""
    mock: bool = False
    """Make random tokens instead of reading files. The sets keep their names and weights; without
    any there is one, `mock`."""
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Background processes per rank that read samples; 0 reads in the training process."""
    verify: Literal["none", "sample", "full"] = "sample"
    """What the run checks against the manifest's hashes: none: nothing; sample: the index, 64
    blocks of tokens, and others when it first reads them; full: everything at each start."""
    train: dict[str, TrainSet] = field(default_factory=dict)
    """Training sets by name; at least one, unless `mock`. `replace: true` beside them leaves out
    the base's section `data`, `NAME: null` one set of it. All sets must have one tokenizer."""
    validation: dict[str, ValidationSet] = field(default_factory=dict)
    """Validation sets by name, which becomes part of their metrics: `val/<name>/loss`. null leaves
    out sets as for `train`."""
    made_by: str | None = None
    """Command that makes the sets, and its cost; shown if a file of theirs is missing."""

    def checks(self) -> Iterator[Check]:
        """Check that there are sets, and their names."""
        none = not self.train and not self.mock
        yield "train", none, "must name at least one set, got none"
        for kind in ("train", "validation"):
            for name in getattr(self, kind):
                rule = f"must name sets by letters, digits, '_', '-' and '.', got {name!r}"
                yield kind, not SET_NAME.fullmatch(name), rule
