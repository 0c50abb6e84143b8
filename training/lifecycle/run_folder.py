"""The run folder: one run at a time in it, and the files by which a run is steered and watched.

lock             held by the run that works in the folder; says which process that is
STOP             made by a person or a script: the run saves, removes it and ends
DONE             the run has taken its last step
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from training.errors import InputError

LOCK: Final = "lock"
STOP: Final = "STOP"
DONE: Final = "DONE"


class FolderError(InputError):
    """A run folder that cannot be used."""


@contextlib.contextmanager
def locked(run_dir: str | Path) -> Iterator[None]:
    """Context in which no other process works in `run_dir`, which is made if it does not exist.

    The lock is the operating system's and ends with the process, however it ends. A STOP file of
    before is removed. Raises FolderError if another run holds it or nothing can be written.
    """
    folder = Path(run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise FolderError(
            f"run.dir {folder} cannot be written to: {error.strerror} ({error.filename})"
        ) from None
    with file:
        try:
            # Of the process, not of the open file: writers and data workers do not inherit it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise FolderError(f"{folder / LOCK} cannot be locked: {error.strerror}") from None
            file.seek(0)
            raise FolderError(
                f"run.dir {folder} is in use by another run: {file.read().strip() or 'unknown'}"
            ) from None
        file.truncate(0)
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}) + "\n")
        file.flush()
        (folder / STOP).unlink(missing_ok=True)
        yield


def mark_done(run_dir: str | Path, done: bool) -> None:
    """Make DONE, or removes it."""
    path = Path(run_dir) / DONE
    if done:
        path.touch()
    else:
        path.unlink(missing_ok=True)
