"""Stop requests: Ctrl-C, a signal, a STOP file, or the SLURM time limit."""

import os
import re
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any, Final

from training.config.schema import StopConfig
from training.errors import Aid
from training.lifecycle.run_folder import STOP
from training.lifecycle.terminal import Interrupts

SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGXCPU)
"""Signals that schedulers and shells send before SIGKILL; SIGXCPU reports that the CPU time limit
is exceeded."""
INTERRUPT: Final = 4
FAILED: Final = 5
REASONS: Final = {
    1: "the SLURM time limit",
    2: "a STOP file",
    3: "a signal",
    INTERRUPT: "Ctrl-C",
    FAILED: "an error between steps",
}


class StopRequests:
    """Stop requests of this rank: signals on all ranks, other requests only on rank 0."""

    def __init__(
        self,
        run_dir: str | Path,
        config: StopConfig,
        *,
        first: bool,
        interrupts: Interrupts | None = None,
    ) -> None:
        """If `first` is true, this rank checks the STOP file and the time limit. `interrupts`
        handles Ctrl-C."""
        self.interrupts = interrupts
        self.stop_file = Path(run_dir) / STOP
        self.first = first
        end = os.environ.get("SLURM_JOB_END_TIME")
        margin = config.slurm_margin_seconds
        self.deadline = None
        if margin is not None and end is not None and re.fullmatch("[0-9]{1,12}", end):
            half = max(0.0, int(end) - time.time()) / 2
            self.deadline = int(end) - min(margin, half)
            if first and margin > half:
                print(
                    f"warning: stop.slurm_margin_seconds = {margin:g} is more than half of the "
                    f"job's remaining {2 * half:.0f} seconds: the run will stop {half:.0f} "
                    "seconds before the job ends"
                )
        elif first and margin is not None and (end is not None or "SLURM_JOB_ID" in os.environ):
            problem = "is not set" if end is None else f"is not a time in seconds: {end!r:.40}"
            print(f"warning: SLURM_JOB_END_TIME {problem}: the run ignores the SLURM time limit")
        self.error: Exception | None = None
        """Error between steps on this rank; the run saves and then ends with this error."""
        self._signalled = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def wanted(self) -> int:
        """Return this rank's stop request as a key of `REASONS`, or 0 if there is no request."""
        if self.error is not None:
            return FAILED
        if self.interrupts is not None and self.interrupts.requested:
            return INTERRUPT
        if self._signalled:
            return 3
        if self.first and os.path.exists(self.stop_file):  # False if the disk does not respond
            return 2
        if self.first and self.deadline is not None and time.time() >= self.deadline:
            return 1
        return 0

    def obeyed(self) -> None:
        """Remove the STOP file, so that the run can continue later."""
        if self.first:
            with Aid(f"{STOP} could not be removed; later starts ignore this file"):
                self.stop_file.unlink(missing_ok=True)
