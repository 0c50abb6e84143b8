"""Launch ranks on this machine for `pretrain.py --ranks N`, as torchrun would."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import FrameType
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from training.command_line import print_error
from training.lifecycle.terminal import CODE, LAUNCHER, SECOND, say

GRACE: Final = 30
"""Seconds between the failure of a rank and the killing of the remaining ranks, as in torchrun."""
KILLED: Final = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of ranks that may have been killed by a second Ctrl-C."""
FORWARDED: Final = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU,
)  # fmt: skip
"""Signals that stop a run."""
POLL: Final = 0.1
"""Seconds between polls of the ranks."""


class Ranks:
    """The rank processes on this machine, and handlers that forward signals to them.

    Signals that arrive before the ranks have started are forwarded after the start.
    """

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.interrupted = self.killed = False
        self._waiting: list[int] = []
        for number in FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._pass_on)
        signal.set_wakeup_fd(-1)

    def started(self, context: SubprocessContext) -> None:
        """Start forwarding signals to the processes of `context`."""
        self.context = context
        self.processes = [handler.proc for handler in context.subprocess_handlers.values()]
        for number in self._waiting:
            self._pass_on(number, None)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to all ranks. A second SIGINT becomes SIGKILL, and signals other than
        SIGINT become SIGTERM."""
        if not self.processes:
            self._waiting.append(number)
            return
        ends = number == signal.SIGINT and self.interrupted
        self.interrupted = self.interrupted or number == signal.SIGINT
        if ends:
            self.killed = True
            say(SECOND)
        if number != signal.SIGINT:
            number = signal.SIGTERM
        for process in self.processes:
            if process.poll() is None and ends:
                os.killpg(process.pid, signal.SIGKILL)
            elif process.poll() is None:
                os.kill(process.pid, number)

    def wait(self) -> int:
        """Wait for all ranks and return the exit code of the first failed rank, or 0."""
        while (codes := [process.poll() for process in self.processes]).count(None):
            failed = [code for code in codes if code]
            if failed and not self.interrupted:
                self.context.close(signal.SIGTERM, GRACE)
                return self._failure(codes)
            time.sleep(POLL)
        if self.interrupted and any(codes):
            return next((code for code in codes if code and code not in (CODE, *KILLED)), CODE)
        return self._failure(codes)

    def _failure(self, codes: Sequence[int | None]) -> int:
        """Return the exit code of the first failed rank (1 if it was killed by a signal), or 0."""
        failed = {rank: code for rank, code in enumerate(codes) if code}
        for rank, code in failed.items():
            if code < 0:
                print_error(f"rank {rank} was killed by {signal.Signals(-code).name}")
        return next((code if code > 0 else 1 for code in failed.values()), 0)


def launch(ranks: int, command: Sequence[str]) -> int:
    """Run a Python `command` in `ranks` processes on this machine and return the exit code.

    Ctrl-C and SIGTERM are forwarded to the ranks. A second Ctrl-C kills the ranks.
    """
    # Ranks print their own errors, so torch's launcher need not log a warning for every signal it
    # sends.
    logging.getLogger(SubprocessContext.__module__).setLevel(logging.ERROR)
    # As in torchrun's agent, the store binds the port so that no other process can take it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        LAUNCHER: str(os.getpid()),
    }
    if ranks > 1:  # threads of different ranks would compete for cores
        common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    environments = {
        rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
    }
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # `Ranks` handles all other signals
    processes = Ranks()
    with tempfile.TemporaryDirectory(prefix="spectrain-ranks-") as folder:
        # Each rank unblocks SIGINT once its handler is installed.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        context = start_processes(
            "pretrain",
            sys.executable,
            {rank: tuple(command) for rank in range(ranks)},
            environments,
            DefaultLogsSpecs(log_dir=folder),
        )
        assert isinstance(context, SubprocessContext)  # the entry point is an external command
        processes.started(context)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        code = processes.wait()
    if processes.killed:  # skip Python's shutdown, which takes a second
        os._exit(code)
    return code
