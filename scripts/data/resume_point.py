"""Save the progress of a preparation, so that it can be resumed after an interruption."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from scripts.data.encoding import RoundTrip
from scripts.data.folder import AtomicFolder
from scripts.data.plan import Portion, Preparation, SetPlan
from scripts.data.set_writer import DocumentFile, Written
from scripts.data.sources import START, Position
from training.errors import ProgressError

SECONDS: Final = 5.0
"""Seconds between saves, and thus the most work that can be lost if the process is killed."""


@dataclass
class Progress:
    """The current position in a preparation, and statistics of the documents before it.

    set, portion  index of the current set and portion
    position      the next input and document
    index         index of the next document within the set
    tokens        number of tokens written from the portion
    end           end of the range of inputs that documents of the portion came from
    read          (first, end) ranges of the inputs read, by set name
    written       statistics of the documents written, by file
    decoded       statistics of the documents decoded, by set name
    parts         (documents, tokens) for each input of a shard, by input index
    left          (first, end) ranges of inputs that a shard left unfinished after reaching its
                  share of the portion's tokens
    tokenizer     sha256 of the tokenizer
    """

    set: int = 0
    portion: int = 0
    position: Position = START
    index: int = 0
    tokens: int = 0
    end: int = 0
    read: dict[str, list[list[int]]] = field(default_factory=dict)
    written: dict[str, Written] = field(default_factory=dict)
    decoded: dict[str, RoundTrip] = field(default_factory=dict)
    parts: dict[str, list[int]] = field(default_factory=dict)
    left: list[list[int]] = field(default_factory=list)
    tokenizer: str = ""

    def file(self, name: str) -> Written:
        """Return the statistics of a document file. The writer updates the statistics in place."""
        return self.written.setdefault(name, Written())

    def portions(self, preparation: Preparation) -> Iterator[tuple[SetPlan, Portion, range]]:
        """Yield the remaining portions, each with the indices of its inputs in the preparation.

        The per-portion counters are reset whenever a new portion starts.
        """
        first = 0
        for i, plan in enumerate(preparation.sets):
            for j, portion in enumerate(plan.portions):
                units = range(first, first + len(portion.inputs))
                if (i, j) > (self.set, self.portion):
                    self.index = self.index if i == self.set else 0
                    self.set, self.portion = i, j
                    self.position, self.tokens, self.end = Position(first), 0, first
                if (i, j) == (self.set, self.portion):
                    yield plan, portion, units
                first = units.stop


def read_progress(saved: Any) -> Progress:
    """Return the progress saved by `ProgressSaver`, or initial progress if `saved` is None.

    Raises ProgressError if `saved` is damaged or from another version of this program.
    """
    if saved is None:
        return Progress()
    try:
        if saved.keys() != asdict(Progress()).keys():
            raise KeyError
        written = {name: Written(**values) for name, values in saved["written"].items()}
        decoded = {name: RoundTrip(**values) for name, values in saved["decoded"].items()}
    except (AttributeError, KeyError, TypeError):
        raise ProgressError("the saved progress is from another version") from None
    position = Position(*saved["position"])
    return Progress(**{**saved, "position": position, "written": written, "decoded": decoded})


class ProgressSaver:
    """Saves the progress periodically, after syncing the files that the progress refers to."""

    def __init__(self, folder: AtomicFolder) -> None:
        self._folder = folder
        self._saved = time.monotonic()

    def save(self, progress: Progress, *files: DocumentFile) -> None:
        """Sync `files` and save the progress, unless the last save was under `SECONDS` ago."""
        if time.monotonic() < self._saved + SECONDS:
            return
        for file in files:
            file.sync()
        self._folder.save(asdict(progress))
        self._saved = time.monotonic()
