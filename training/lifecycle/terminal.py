"""Handling of Ctrl-C, and of output after the terminal is closed.

Before training, Ctrl-C and SIGTERM end the process. During training, the first Ctrl-C saves and
stops the run, and a second Ctrl-C kills the run. A rank receives SIGTERM when its launcher exits. A
run survives the closing of its terminal or pipe and, during training, a full log disk. This module
only imports modules that load fast, so that a run handles signals right from the start.
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
"""Error numbers raised by writes to a terminal or pipe whose other end is closed."""


class LastingFile(io.FileIO):
    """A file for output to a terminal or pipe. Output is dropped if the other end of the terminal
    or pipe is closed. During `training`, any output that cannot be written is dropped."""

    training = False

    def write(self, data: Any) -> int:
        """Write to the file, like FileIO.write."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE and not LastingFile.training:
                raise
            return len(data)


def outlive_readers() -> None:
    """Replace stdout and stderr with streams that escape unencodable characters and drop output if
    the reader is gone."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # Notebooks use their own streams, and a stream with a closed descriptor is None.
        if isinstance(stream, io.TextIOWrapper):
            by_line = stream.line_buffering or stream.write_through
            file = io.BufferedWriter(LastingFile(stream.fileno(), "w", closefd=False))
            lasting = io.TextIOWrapper(
                file, stream.encoding, "backslashreplace", line_buffering=by_line
            )
            setattr(sys, name, lasting)


def say(text: str) -> None:
    """Write a line to stderr, bypassing Python's streams, which the main thread may have locked."""
    with suppress(OSError):  # the reader is gone
        os.write(2, f"{text}\n".encode())


CODE: Final = 130
"""Exit code of a run that Ctrl-C has ended: 128 plus the signal number, as in shells."""
SECOND: Final = "ended by a second Ctrl-C; earlier checkpoints are complete"
LAUNCHER: Final = "SPECTRAIN_LAUNCHER"
"""Environment variable with the process id of the `--ranks` launcher."""
PR_SET_PDEATHSIG: Final = 1
"""Linux prctl option for the signal that a process receives when its parent exits."""


class Interrupts:
    """Handles SIGINT. Before training and after a first Ctrl-C, also handles SIGTERM.

    A launcher (torchrun or `--ranks`) forwards the first SIGINT to its ranks. The ranks may also
    receive this SIGINT directly from the terminal. After a second Ctrl-C, the launcher sends
    SIGTERM to its ranks. Without a launcher, the process receives a second SIGINT. Signals are
    handled by a thread, so that a process blocked in a collective also exits.
    """

    def __init__(self) -> None:
        self.requested = False
        self._training = False
        launched = "LOCAL_RANK" in os.environ
        self._second = signal.SIGTERM if launched else signal.SIGINT
        self._first_rank = os.environ.get("RANK", "0") == "0"

    def listen(self) -> None:
        """Install the signal handlers. Call this once, from the main thread."""
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        signal.signal(signal.SIGINT, _noted)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _noted)
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_ignore)
        threading.Thread(target=self._read, args=(receiver,), daemon=True).start()
        _release()
        _stop_with_launcher()

    def training_begins(self, *, saves: bool) -> None:
        """From now on, the first SIGINT sets `requested` instead of ending the process, and output
        that cannot be written is dropped. `saves` is false if the run saves no checkpoints."""
        self._saves = saves
        self._training = LastingFile.training = True

    def _read(self, receiver: int) -> None:
        """Handle signals as their numbers arrive on the pipe, one byte each."""
        while True:
            number = os.read(receiver, 1)[0]
            if self.requested and number == self._second:
                self._end(SECOND)
            elif number == signal.SIGTERM and signal.getsignal(number) is _noted:
                when = "" if self._training else " before training began"
                self._end(f"ended by SIGTERM{when}", 128 + number)
            elif number == signal.SIGINT and not self._training:
                self._end("ended by Ctrl-C before training began")
            elif number == signal.SIGINT and not self.requested:
                self.requested = True
                how = "saves after the next step and stops"
                if not self._saves:
                    how = "stops after the next step without saving"
                self._say(f"Ctrl-C: the run {how}; a second Ctrl-C stops it immediately")

    def _end(self, text: str, code: int = CODE) -> None:
        """Exit, killing all child processes."""
        self._say(text)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(code)

    def _say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self._first_rank:
            say(text)


def _stop_with_launcher() -> None:
    """Make Linux send SIGTERM to this rank when its launcher exits.

    A killed launcher forwards no signal, so its ranks would keep training. On systems other than
    Linux, they do keep training.
    """
    if not os.environ.get(LAUNCHER, "").isdecimal():  # rejected later by `check_launched`
        return
    launcher = os.environ.pop(LAUNCHER)
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):  # the launcher has already exited
        os.kill(os.getpid(), signal.SIGTERM)


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing: the thread handles the signal."""


def _hold() -> None:
    """Block SIGINT in this thread while it forks.

    Until the child process ignores SIGINT, a Ctrl-C would make the child write to its parent's pipe
    as well, and the parent would count the Ctrl-C twice.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


def _release() -> None:
    """Unblock SIGINT in this thread."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _ignore() -> None:
    """Ignore SIGINT in a child process, because the parent handles it. SIGTERM ends the child."""
    if signal.getsignal(signal.SIGTERM) is _noted:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is _noted:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _release()
