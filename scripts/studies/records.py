"""The records of finished runs, one line of JSON each, and claims on runs in progress."""

import fcntl
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from training.errors import InputError
from training.json_file import check_shape, parse_json
from training.report.log_lines import drop_unfinished_line

RECORDS = "runs.jsonl"
CLAIM = "claim"


@dataclass(frozen=True)
class Record:
    """A finished run.

    key       hash of the run's merged config, by which the record is found again
    settings  config file and all overrides
    failed    whether the loss or gradient became nonfinite; the run then has no loss
    seconds   processor time of its process, including start and validation
    figures   result of trainer.py's `summary`
    facts     `environment` and `data` with which the run was trained, {} in earlier versions
    """

    key: str
    label: str
    settings: list[str]
    failed: bool
    seconds: float
    figures: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        """The last validation loss, nats per token; None if the run failed."""
        return None if self.failed else self.figures["loss"]


SHAPE = {
    "key": str,
    "label": str,
    "settings": [str],
    "failed": bool,
    "seconds": int | float,
    "figures": {"loss": int | float | None, "course": [[int | float]]},
}
"""The shape of a line, for `check_shape`."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines. Raises InputError for a line that is damaged."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            records.append(parse_json(line))
        except ValueError as error:
            raise InputError(f"{path}, line {number}: invalid JSON: {error}") from None
        check_shape(records[-1], SHAPE, f"{path}, line {number}")
    return records


class RecordBook:
    """The records in `folder`/runs.jsonl, by key.

    Several threads and several processes may add records.
    """

    def __init__(self, folder: Path) -> None:
        """Read the existing records."""
        self.path = folder / RECORDS
        self._lock = threading.Lock()
        self._records: dict[str, Record] = {}
        self.refresh()

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __getitem__(self, key: str) -> Record:
        return self._records[key]

    def refresh(self) -> None:
        """Read the records that other processes have added."""
        if self.path.is_file():
            with self._file():
                for line in read_lines(self.path):
                    self._records[line["key"]] = Record(**line)

    def add(self, record: Record) -> None:
        """Add a record, first on disk, then in memory."""
        with self._file() as file:
            file.write(json.dumps(asdict(record)) + "\n")
        self._records[record.key] = record

    @contextmanager
    def _file(self) -> Iterator[TextIO]:
        """Context with the file open at its end and locked against other threads and processes.

        An incomplete line of a killed process is removed.
        """
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                drop_unfinished_line(self.path)
                yield file
                file.flush()


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Context whose value is True if no other thread or process works on `folder`.

    The claim is a lock, which the operating system releases however the process ends. A file system
    shared by several nodes must support locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / CLAIM).open("a", encoding="utf-8") as file:
        try:
            # A lock of the open file distinguishes threads, and survives closing other files.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
