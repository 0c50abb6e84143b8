"""The terminal of a run: Ctrl-C, and output after the terminal is closed.

Before training, Ctrl-C ends the process; later it stops the run, and a second Ctrl-C ends it. A
rank whose launcher has ended gets SIGTERM. A run continues when its terminal or pipe is closed, and
while training also when the disk of its log is full. The imports are fast, because a run handles
Ctrl-C from its first line on.
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
    """A file that drops output that has no reader and, while `training`, all output that fails."""

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
    """Replace stdout and stderr by streams that drop output without a reader and escape characters
    that their encoding lacks."""
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
"""Exit code of a run that Ctrl-C has ended: 128 plus the number of the signal, as in shells."""
SECOND: Final = "ended by a second Ctrl-C; earlier checkpoints are complete"
LAUNCHER: Final = "SPECTRAIN_LAUNCHER"
"""Environment variable with the process id of the launcher of `--ranks`."""
PR_SET_PDEATHSIG: Final = 1
"""Linux prctl option: the signal that a process gets when its parent ends."""


class Interrupts:
    """Handler of SIGINT, and of the signal that a second SIGINT becomes.

    A launcher (torchrun, or `--ranks`) forwards the first SIGINT to its ranks, which may also
    receive it directly. When a person presses Ctrl-C again, the launcher sends SIGTERM to its
    ranks; without a launcher the process gets a second SIGINT. A thread handles signals, so that a
    process that waits in a collective ends too.
    """

    def __init__(self) -> None:
        self.requested = False
        self._training = False
        launched = "LOCAL_RANK" in os.environ
        self._second = signal.SIGTERM if launched else signal.SIGINT
        self._first_rank = os.environ.get("RANK", "0") == "0"

    def listen(self) -> None:
        """Take over SIGINT; called once, by the main thread."""
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        signal.signal(signal.SIGINT, _noted)
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_ignore)
        threading.Thread(target=self._read, args=(receiver,), daemon=True).start()
        _release()
        _stop_with_launcher()

    def training_begins(self) -> None:
        """Make the first SIGINT set `requested` instead of ending the process, and drop output that
        cannot be written, from now on."""
        self._training = LastingFile.training = True

    def _read(self, receiver: int) -> None:
        """Handle signals, whose numbers are bytes of the pipe."""
        while True:
            number = os.read(receiver, 1)[0]
            if self.requested and number == self._second:
                self._end(SECOND)
            elif number == signal.SIGINT and not self._training:
                self._end("ended by Ctrl-C before training began")
            elif number == signal.SIGINT and not self.requested:
                self.requested = True
                self._say(
                    "Ctrl-C: the run saves after the next step and stops; a second Ctrl-C stops it "
                    "at once"
                )

    def _end(self, text: str) -> None:
        """End this process and its child processes."""
        self._say(text)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(CODE)

    def _say(self, text: str) -> None:
        """Print a line once for all ranks."""
        if self._first_rank:
            say(text)


def _stop_with_launcher() -> None:
    """Request SIGTERM for this rank when its launcher ends.

    A killed launcher forwards no signals, so its ranks would continue to train. On systems other
    than Linux they do.
    """
    if not os.environ.get(LAUNCHER, "").isdecimal():  # `check_launched` refuses such values
        return
    launcher = os.environ.pop(LAUNCHER)
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):  # the launcher has already ended
        os.kill(os.getpid(), signal.SIGTERM)


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing, as the thread gets the signal."""


def _hold() -> None:
    """Block SIGINT in this thread while it forks.

    A child that does not yet ignore SIGINT would write to its parent's pipe, so one Ctrl-C would
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
