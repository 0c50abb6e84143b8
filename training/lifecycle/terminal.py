"""The terminal of a run: Ctrl-C, and output after the terminal is closed.

Before training, Ctrl-C ends the process; later it stops the run, and a second Ctrl-C ends it. A
rank whose launcher has ended gets SIGTERM. A run continues without its terminal or pipe, and while
training also with a full log disk. The imports are fast, as a run handles Ctrl-C from its first
line on.
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
    """A file that drops output without a reader and, while `training`, all failed output."""

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
    """Replace stdout and stderr by streams that drop output without a reader, and escape characters
    outside their encoding."""
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
    receive it directly. A person's second SIGINT reaches them as SIGTERM. Without a launcher the
    second is SIGINT again. A thread handles signals, so that a process that waits in a collective
    ends too.
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
        """From now on, let the first SIGINT set `requested` instead of ending the process, and drop
        output that cannot be written."""
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
    """Request SIGTERM for this rank when its launcher ends: a killed launcher forwards nothing, and
    its ranks would train on alone. On systems other than Linux they do train on."""
    if not os.environ.get(LAUNCHER, "").isdecimal():  # which `check_launched` refuses
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
    """Block SIGINT in this thread while it forks: a child that does not ignore it yet would write
    to its parent's pipe, which would count one Ctrl-C as two."""
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
