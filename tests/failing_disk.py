"""Simulate a failing disk: build the library in failing_disk.c, and run pretrain.py with it
preloaded."""

import os
import resource
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.forked_runs import Worker
from tests.paths import ROOT

KINDS: Final = ("write", "fsync", "rename", "stat", "open", "mkdir", "unlink")
"""Kinds of calls, in the library's order."""


def compiler() -> str | None:
    """Return the path of a C compiler, or None if there is none."""
    return shutil.which("cc")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Context manager that limits the files of this process to `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@dataclass(frozen=True)
class Fault:
    """Which calls fail: the `number`-th call of a kind and every `period`-th one after it (0: none
    after it).

    error    errno to fail with
    """

    kind: str | None = None
    number: int = 0
    error: int = 0
    period: int = 0

    def __bytes__(self) -> bytes:
        """Return the contents of the control file for a run that has not started."""
        kind = KINDS.index(self.kind) if self.kind else -1
        head = kind, self.number, self.error, self.period
        return struct.pack("11q", *head, *[0] * len(KINDS))


class FailingDisk:
    """Executes runs in subfolders of `folder`/runs, in which calls fail."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        self.runs.mkdir()
        library = folder / "failing_disk.so"
        self.control, self.log = folder / "control", folder / "calls"
        self.control.write_bytes(bytes(Fault()))
        source = ROOT / "tests" / "failing_disk.c"
        subprocess.run(
            [str(compiler()), "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True
        )
        self.variables = {
            "LD_PRELOAD": str(library),
            "FAULT_FOLDER": str(self.runs),
            "FAULT_CONTROL": str(self.control),
            "FAULT_LOG": str(self.log),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        self._worker = Worker(os.environ | self.variables)

    def run(self, name: str, arguments: Sequence[str], fault: Fault = Fault()) -> tuple[int, str]:
        """Train in the folder `name`. Return the exit code and the output."""
        with self.control.open("r+b") as file:  # in place, because the worker has mapped this file
            file.write(bytes(fault))
        self.log.write_bytes(b"")
        output = self.runs.parent / f"{name}.txt"
        code, _ = self._worker.run([*arguments, f"run.dir={self.runs / name}"], output)
        return code, output.read_text()

    def calls(self, name: str) -> list[tuple[str, int, str]]:
        """Return the kind, number within its kind, and path of each call that the last run made in
        the folder `name`."""
        counts = dict.fromkeys(KINDS, 0)
        found = []
        for line in self.log.read_text().splitlines():
            kind, path = line.split(" ", 1)
            counts[kind] += 1
            found.append((kind, counts[kind], path.removeprefix(f"{name}/")))
        return found

    def close(self) -> None:
        """Stop the process that forks runs."""
        self._worker.close()


def settings(config: Mapping[str, object]) -> list[str]:
    """Convert overrides to command-line arguments."""
    return [f"{key}={value}" for key, value in config.items()]
