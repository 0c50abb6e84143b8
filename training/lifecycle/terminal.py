"""The terminal of a run: Ctrl-C, and output after the terminal is closed.

Before training, Ctrl-C ends the process. During training, the first Ctrl-C saves and stops the run.
A second Ctrl-C kills it. A rank receives SIGTERM when its launcher ends. A run continues if its
terminal or pipe is closed. During training it also continues if the disk of its log is full. This
module imports only fast modules, because a run handles Ctrl-C from the very start.
"""

import errno
import io
import multiprocessing
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, Final

GONE: Final = (errno.EIO, errno.EPIPE)
"""Errors of writing to a terminal or a pipe whose other end is closed."""


class LastingFile(io.FileIO):
    """A file that drops output if its reader is gone. During `training` it drops all output that
    cannot be written."""

    training = False

    def write(self, data: Any) -> int:
        """Write to the file like FileIO.write."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE and not LastingFile.training:
                raise
            return len(data)


def outlive_readers() -> None:
    """Replace stdout and stderr with streams that escape characters that cannot be encoded. The
    streams drop output if its reader is gone."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # A notebook uses its own stream, and a stream with a closed descriptor is None.
        if isinstance(stream, io.TextIOWrapper):
            by_line = stream.line_buffering or stream.write_through
            file = io.BufferedWriter(LastingFile(stream.fileno(), "w", closefd=False))
            lasting = io.TextIOWrapper(
                file, stream.encoding, "backslashreplace", line_buffering=by_line
            )
            setattr(sys, name, lasting)


def say(text: str) -> None:
    """Write a line to stderr without Python's streams, which the main thread may have locked."""
    with suppress(OSError):  # there is no reader
        os.write(2, f"{text}\n".encode())


CODE: Final = 130
"""Exit code of a run that Ctrl-C ended: 128 plus the signal number, as in shells."""
SECOND: Final = "ended by a second Ctrl-C; earlier checkpoints are complete"
LAUNCHER: Final = "SPECTRAIN_LAUNCHER"
"""Environment variable with the process id of the launcher of `--ranks`."""
PR_SET_PDEATHSIG: Final = 1
"""Linux prctl option that sets the signal a process receives when its parent ends."""


class Interrupts:
    """Handler for SIGINT and for the signal that follows a second Ctrl-C.

    A launcher (torchrun or `--ranks`) forwards the first SIGINT to its ranks, which may also
    receive it directly. After a second Ctrl-C, the launcher sends SIGTERM to its ranks. Without a
    launcher, the process receives a second SIGINT. A thread handles the signals, so that a process
    that waits in a collective also ends.
    """

    def __init__(self) -> None:
        self.requested = False
        self._training = False
        launched = "LOCAL_RANK" in os.environ
        self._second = signal.SIGTERM if launched else signal.SIGINT
        self._first_rank = os.environ.get("RANK", "0") == "0"

    def listen(self) -> None:
        """Install the SIGINT handler. The main thread calls this once."""
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        signal.signal(signal.SIGINT, _noted)
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_ignore)
        threading.Thread(target=self._read, args=(receiver,), daemon=True).start()
        _release()
        _stop_with_launcher()

    def training_begins(self, *, saves: bool) -> None:
        """Make the first SIGINT set `requested` instead of ending the process, and drop output that
        cannot be written. `saves` is false if the run saves no checkpoints."""
        self._saves = saves
        self._training = LastingFile.training = True

    def _read(self, receiver: int) -> None:
        """Handle signals, whose numbers are read from the pipe as bytes."""
        while True:
            number = os.read(receiver, 1)[0]
            if self.requested and number == self._second:
                self._end(SECOND)
            elif number == signal.SIGINT and not self._training:
                self._end("ended by Ctrl-C before training began")
            elif number == signal.SIGINT and not self.requested:
                self.requested = True
                how = "saves after the next step and stops"
                if not self._saves:
                    how = "stops after the next step without saving"
                self._say(f"Ctrl-C: the run {how}; a second Ctrl-C stops it immediately")

    def _end(self, text: str) -> None:
        """End this process and its child processes."""
        self._say(text)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(CODE)

    def _say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self._first_rank:
            say(text)


def _stop_with_launcher() -> None:
    """Make Linux send SIGTERM to this rank when its launcher ends.

    A killed launcher does not forward a signal, so its ranks would continue to train, as they do on
    other systems.
    """
    if not os.environ.get(LAUNCHER, "").isdecimal():  # `check_launched` rejects such values
        return
    launcher = os.environ.pop(LAUNCHER)
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):  # the launcher has already ended
        os.kill(os.getpid(), signal.SIGTERM)


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing, because the thread handles the signal."""


def _hold() -> None:
    """Block SIGINT in this thread while it forks.

    A child that does not yet ignore SIGINT would write to its parent's pipe, and one Ctrl-C would
    count as two.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


def _release() -> None:
    """Unblock SIGINT in this thread."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _ignore() -> None:
    """Ignore SIGINT, which the parent process handles."""
    if signal.getsignal(signal.SIGINT) is _noted:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _release()
