"""The progress of a preparation, saved so that an interrupted preparation can be resumed."""

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
"""Seconds between saves: the longest work that is repeated after a kill."""


@dataclass
class Progress:
    """The current position in a preparation, and counts of the documents before it.

    set, portion  numbers of the current set and portion
    input         number of the next input in the portion
    document      number of the next document in the input
    index         number of the next document in the set
    tokens        number of tokens written from the portion
    last          number of the input that contains the last document
    read          (first, end) ranges of inputs read, by set name
    written       counts of written documents, by file
    decoded       counts of decoded documents, by set name
    parts         (documents, tokens) of each input of a shard, by input number
    left          (first, end) ranges of inputs that a shard did not finish because it reached its
                  share of the portion's tokens
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
        """Return the counts of a document file, which the writer updates in place."""
        return self.written.setdefault(name, Written())

    @property
    def position(self) -> Position:
        """The position in the inputs of the current portion."""
        return Position(self.input, self.document)

    def portions(self, preparation: Preparation) -> Iterator[tuple[SetPlan, Portion, int]]:
        """Yield the remaining portions, each with the number of its first input.

        The portion's counters are reset at the start of each new portion.
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
    """Return the progress saved by `Saver`, or None without progress."""
    if saved is None:
        return Progress()
    written = {name: Written(**values) for name, values in saved["written"].items()}
    decoded = {name: RoundTrip(**values) for name, values in saved["decoded"].items()}
    return Progress(**{**saved, "written": written, "decoded": decoded})


class Saver:
    """Periodic saving of the progress, after the counted files were synced to disk."""

    def __init__(self, folder: AtomicFolder) -> None:
        self._folder = folder
        self._saved = time.monotonic()

    def save(self, progress: Progress, *files: DocumentFile) -> None:
        """Sync `files` and save the progress, if the last save was at least `SECONDS` ago."""
        if time.monotonic() < self._saved + SECONDS:
            return
        for file in files:
            file.sync()
        self._folder.save(asdict(progress))
        self._saved = time.monotonic()
