"""Which of several processes trains a run: studies that are started together share the work."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

FILE: Final = "claim"


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Context that says whether nobody else, in this process or another, works on `folder`.

    The operating system holds the claim and gives it up however the process ends. A file system of
    several nodes must support locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a") as file:
        try:
            # A lock of the open file: threads are told apart, and other files may be closed.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
