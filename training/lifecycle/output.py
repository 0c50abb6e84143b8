"""Output that cannot be written: a run whose terminal or pipe was closed goes on without, as does
one that trains while the disk of its log is full."""

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any, Final

GONE: Final = (errno.EIO, errno.EPIPE)
"""Errors of writing to a terminal, and to a pipe, that was closed at its other end."""


class LastingFile(io.FileIO):
    """A file that drops what nobody can read and, while `training`, all that cannot be written."""

    training = False

    def write(self, data: Any) -> int:
        """Write to the file as FileIO does."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE and not LastingFile.training:
                raise
            return len(data)


def outlive_readers() -> None:
    """Replace stdout and stderr by streams that drop what nobody can read, and write what their
    encoding lacks with backslashes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # A notebook has its own, and one whose descriptor was closed from the start is None.
        if isinstance(stream, io.TextIOWrapper):
            by_line = stream.line_buffering or stream.write_through
            file = io.BufferedWriter(LastingFile(stream.fileno(), "w", closefd=False))
            lasting = io.TextIOWrapper(
                file, stream.encoding, "backslashreplace", line_buffering=by_line
            )
            setattr(sys, name, lasting)


def say(text: str) -> None:
    """Write a line to stderr past Python's streams, which the main thread may hold."""
    with suppress(OSError):  # nobody can read it
        os.write(2, f"{text}\n".encode())
