"""The terminal of a run: Ctrl-C, and output that nobody can read any more.

Before training Ctrl-C ends the process, then it stops the run, and a second one ends it. A rank
whose launcher has gone gets SIGTERM. A run whose terminal or pipe was closed continues without, as
does one that trains while the disk of its log is full. Imports nothing that takes time, as a run
listens from its first line on.
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


CODE: Final = 130
"""Exit code of a run that Ctrl-C has ended: 128 and the number of the signal, as in shells."""
SECOND: Final = "ended by a second Ctrl-C; checkpoints saved before are whole"
LAUNCHER: Final = "SPECTRAIN_LAUNCHER"
"""Environment variable with the process that `--ranks` starts ranks from."""
PR_SET_PDEATHSIG: Final = 1
"""Of Linux' prctl: the signal that a process gets when its parent ends."""


class Interrupts:
    """Listener for SIGINT, and after it for the signal that a second one becomes.

    A launcher (torchrun, or `--ranks`) passes the first SIGINT on to its ranks, perhaps beside one
    from elsewhere. The second one of a person reaches them as SIGTERM. Without a launcher the
    second is SIGINT again. A thread listens, so that a process that waits in a collective ends too.
    """

    def __init__(self) -> None:
        self.requested = False
        self._training = False
        launched = "LOCAL_RANK" in os.environ
        self._second = signal.SIGTERM if launched else signal.SIGINT
        self._first_rank = os.environ.get("RANK", "0") == "0"

    def listen(self) -> None:
        """Take over SIGINT; of the main thread, once."""
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        signal.signal(signal.SIGINT, _noted)
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_ignore)
        threading.Thread(target=self._read, args=(receiver,), daemon=True).start()
        _release()
        _stop_with_launcher()

    def training_begins(self) -> None:
        """From now on the first SIGINT sets `requested` instead of ending the process, and output
        that cannot be written ends nothing."""
        self._training = LastingFile.training = True

    def _read(self, receiver: int) -> None:
        """Act on each signal, whose number is a byte of the pipe."""
        while True:
            number = os.read(receiver, 1)[0]
            if self.requested and number == self._second:
                self._end(SECOND)
            elif number == signal.SIGINT and not self._training:
                self._end("ended by Ctrl-C before training began")
            elif number == signal.SIGINT and not self.requested:
                self.requested = True
                self._say("Ctrl-C: the run saves after the next step; once more ends it at once")

    def _end(self, text: str) -> None:
        """End this process and those that it started."""
        self._say(text)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(CODE)

    def _say(self, text: str) -> None:
        """Say a line once for all ranks."""
        if self._first_rank:
            say(text)


def _stop_with_launcher() -> None:
    """Let this rank get SIGTERM when its launcher ends: one that was killed passes nothing on, and
    its ranks would train on with nobody in charge. On other systems than Linux they do."""
    if not os.environ.get(LAUNCHER, "").isdecimal():  # which `check_launched` refuses
        return
    launcher = os.environ.pop(LAUNCHER)
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):  # it has ended before
        os.kill(os.getpid(), signal.SIGTERM)


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing: the thread has been told."""


def _hold() -> None:
    """Keep SIGINT from this thread while it forks: a child that is not yet deaf to it would write
    to the pipe of its parent, which would count one Ctrl-C as two."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


def _release() -> None:
    """Let SIGINT come to this thread."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _ignore() -> None:
    """Leave SIGINT to the process that forked this one."""
    if signal.getsignal(signal.SIGINT) is _noted:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _release()
