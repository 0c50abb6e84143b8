"""Records of finished runs, stored as JSON lines, and claims to runs in progress."""

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

    key       hash of the run's merged config, which identifies the record
    settings  config file and all overrides
    failed    whether the loss or gradient became nonfinite; failed runs have no loss
    seconds   CPU time of the run, including startup and validation
    figures   result of `summary` in trainer.py
    facts     the run's `environment`, `data` and `versions`; {} in records from earlier versions
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
        """The final validation loss in nats per token, or None if the run failed."""
        return None if self.failed else self.figures["loss"]


SHAPE = {
    "key": str,
    "label": str,
    "settings": [str],
    "failed": bool,
    "seconds": int | float,
    "figures": {"loss": int | float | None, "course": [[int | float | None]]},
}
"""Shape of a line, to validate with `check_shape`."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects in a JSON lines file. Raises InputError if a line is malformed."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            records.append(parse_json(line))
        except ValueError as error:
            raise InputError(f"{path}, line {number}: invalid JSON: {error}") from None
        check_shape(records[-1], SHAPE, f"{path}, line {number}")
    return records


class RecordBook:
    """The records in `folder`/runs.jsonl, by key. Several threads and processes may add records."""

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
        """Read records that other processes have added."""
        if self.path.is_file():
            with self._file():
                for line in read_lines(self.path):
                    self._records[line["key"]] = Record(**line)

    def add(self, record: Record) -> None:
        """Add a record, on disk and in memory."""
        with self._file() as file:
            file.write(json.dumps(asdict(record)) + "\n")
        self._records[record.key] = record

    @contextmanager
    def _file(self) -> Iterator[TextIO]:
        """Open the file for appending and lock it against other threads and processes.

        An incomplete line left by a killed process is removed.
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
    """Context manager that claims `folder`. It yields False if another thread or process has
    claimed the folder.

    The claim is a file lock, which the operating system releases even if the process is killed. A
    file system that is shared by nodes must support locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / CLAIM).open("a", encoding="utf-8") as file:
        try:
            # flock locks are per open file, so they also exclude other threads and are not released
            # when another descriptor is closed.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
