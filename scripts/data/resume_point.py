"""The progress of a preparation, saved so that the next run can continue an interrupted run."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from scripts.data.encoding import RoundTrip
from scripts.data.folder import AtomicFolder
from scripts.data.plan import Portion, Preparation, SetPlan
from scripts.data.set_writer import DocumentFile, Written
from scripts.data.sources import Position

SECONDS: Final = 5.0
"""Seconds between saves; at most this much work is repeated after a kill."""


@dataclass
class Progress:
    """A position in the portions of a preparation, and the counts up to that position.

    set, portion  numbers of the set and the portion that are read now
    input         number of the next input of the portion
    document      number of the next document of the input
    index         number of the next training document of the set
    tokens        number of tokens from the portion
    last          number of the input of the last document
    read          (first, end) ranges of read inputs, by name of the set
    written       counts of the written documents, by file
    decoded       counts of the decoded documents, by name of the set
    parts         (documents, tokens) of each input of a shard, by the input's number
    left          (first, end) ranges of inputs that a shard has not finished, because it reached
                  its share of the portion's tokens
    """

    set: int = 0
    portion: int = 0
    input: int = 0
    document: int = 0
    index: int = 0
    tokens: int = 0
    last: int = 0
    read: dict[str, list[list[int]]] = field(default_factory=dict)
    written: dict[str, Written] = field(default_factory=dict)
    decoded: dict[str, RoundTrip] = field(default_factory=dict)
    parts: dict[str, list[int]] = field(default_factory=dict)
    left: list[list[int]] = field(default_factory=list)

    def file(self, name: str) -> Written:
        """Return the counts of a file of documents; the writer updates them in place."""
        return self.written.setdefault(name, Written())

    @property
    def position(self) -> Position:
        """The position in the portion's inputs."""
        return Position(self.input, self.document)

    def portions(self, preparation: Preparation) -> Iterator[tuple[SetPlan, Portion, int]]:
        """Yield the remaining portions, each with the number of its first input.

        Counters of a portion are reset when the next portion begins.
        """
        first = 0
        for number, plan in enumerate(preparation.sets):
            for place, portion in enumerate(plan.portions):
                if (number, place) > (self.set, self.portion):
                    self.index = self.index if number == self.set else 0
                    self.set, self.portion = number, place
                    self.input = self.document = self.tokens = self.last = 0
                if (number, place) == (self.set, self.portion):
                    yield plan, portion, first
                first += len(portion.inputs)


def read_progress(saved: Any) -> Progress:
    """Return the progress that `Saver` saved, or a new progress if `saved` is None."""
    if saved is None:
        return Progress()
    written = {name: Written(**values) for name, values in saved["written"].items()}
    decoded = {name: RoundTrip(**values) for name, values in saved["decoded"].items()}
    return Progress(**{**saved, "written": written, "decoded": decoded})


class Saver:
    """Saves the progress every few seconds, after flushing the counted files to the disk."""

    def __init__(self, folder: AtomicFolder) -> None:
        self._folder = folder
        self._saved = time.monotonic()

    def save(self, progress: Progress, *files: DocumentFile) -> None:
        """Save the progress if the last save was at least `SECONDS` ago."""
        if time.monotonic() < self._saved + SECONDS:
            return
        for file in files:
            file.sync()
        self._folder.save(asdict(progress))
        self._saved = time.monotonic()
