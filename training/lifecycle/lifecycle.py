"""Saving, stop requests and heartbeat of a run.

Stop requests are Ctrl-C, signals, a STOP file, and the SLURM time limit. Hung ranks dump stack
traces.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final, ParamSpec

from torch import profiler

from parallel.comm.collectives import Agreement
from parallel.disk import replace_file
from training.checkpoint.saving import CheckpointError, Saver
from training.config import Config
from training.config.schema import StopConfig
from training.errors import Aid
from training.lifecycle.run_folder import HEARTBEAT, STOP
from training.lifecycle.terminal import Interrupts

STACKS: Final = "stacks"
PAUSE: Final = 10.0
"""Seconds between heartbeat updates."""


class Watchdog:
    """Per-rank watchdog, fed by `beat`.

    Rank 0 regularly writes the step, the time (seconds since 1970) and the process id to
    `heartbeat.json`. After `hang_seconds` without progress, a thread on each rank dumps Python
    stack traces to `stacks/rank_00000.txt` and so on. The process group timeout then ends the run.
    If a file cannot be written, the run continues.
    """

    def __init__(self, config: Config, rank: int) -> None:
        self.folder = Path(config.run.dir)
        self.rank = rank
        self.limit = config.watchdog.hang_seconds
        if self.limit is not None:  # the stacks are dumped before the process group timeout
            self.limit = min(self.limit, config.parallel.timeout_seconds / 2)
        self.stacks = self.folder / STACKS / f"rank_{rank:05d}.txt"
        self._file: IO[bytes] | None = None
        self._stacks_aid = Aid("no stack traces will be written")
        self._heartbeat_aid = Aid(f"{HEARTBEAT} is not up to date")
        self._written = -float("inf")
        self._armed = -float("inf")

    def __enter__(self) -> "Watchdog":
        if self.limit is not None:
            with self._stacks_aid:
                self.stacks.parent.mkdir(exist_ok=True)
                replace_file(self.stacks, "")
                self._file = self.stacks.open("ab")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            return
        faulthandler.cancel_dump_traceback_later()
        with self._stacks_aid, self._file:
            hung = os.fstat(self._file.fileno()).st_size
            if not hung:
                self.stacks.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # fails while other ranks' files are there
                    self.stacks.parent.rmdir()
            elif self.rank == 0:
                print(f"the run stalled for a while; see the stack traces in {self.stacks.parent}")

    def beat(self, step: int) -> None:
        """Record progress after `step` steps."""
        now = time.monotonic()
        if self.limit and self._file is not None and now - self._armed > self.limit / 10:
            # Not on every step, because each call starts a thread.
            self._armed = now
            faulthandler.dump_traceback_later(self.limit, file=self._file)
        if self.rank == 0 and now - self._written > PAUSE:
            self._written = now
            content = {"step": step, "time": time.time(), "pid": os.getpid()}
            with self._heartbeat_aid:
                replace_file(self.folder / HEARTBEAT, json.dumps(content) + "\n")


SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGXCPU)
"""Signals sent by schedulers and shells before SIGKILL; SIGXCPU means that the CPU time limit has
been exceeded."""
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
    """Stop requests on this rank. Requests other than signals are only checked on rank 0."""

    def __init__(
        self, run_dir: str | Path, config: StopConfig, *, first: bool, interrupts: Interrupts | None
    ) -> None:
        """If `first` is true, this rank checks for the STOP file and the time limit. `interrupts`
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
        """Error between steps on this rank; the run saves and then exits with this error."""
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
        if self.first and os.path.exists(self.stop_file):  # False if the disk is unavailable
            return 2
        if self.first and self.deadline is not None and time.time() >= self.deadline:
            return 1
        return 0


P = ParamSpec("P")


Checkpoint = Callable[[], Mapping[str, Any]]
"""Returns the trainer's non-tensor state, to be stored in a checkpoint. Collective."""


class NoLifecycle:
    """Lifecycle of a loop that neither saves checkpoints nor stops before the last step."""

    reason: str | None = None
    """Reason for stopping, identical on all ranks; None if no stop has been requested."""

    def after_step(self, step: int) -> None:
        """Exchange stop requests after `step`."""

    def stop_now(self) -> bool:
        """Return whether a stop has been requested on any rank. Collective."""
        return False

    def beat(self) -> None:
        """Send a heartbeat."""

    def save_if_due(self, step: int, checkpoint: Checkpoint) -> None:
        """Start to save if a regular checkpoint is due after `step`."""

    def save_last(self, checkpoint: Checkpoint) -> None:
        """Save the last step unless it is already saved."""


@dataclass(eq=False)
class Lifecycle(NoLifecycle):
    """Saving, stop requests and heartbeat of a run. Every rank calls `after_step` after every step.

    If an event such as a signal reaches any rank, all ranks react to it at the same step.
    """

    config: Config
    saver: Saver
    stops: StopRequests
    watchdog: Watchdog
    agreement: Agreement
    step: int = 0
    reason: str | None = None
    _asked_about_save: bool = False

    def deferring(self, call: Callable[P, None]) -> Callable[P, None]:
        """Wrap `call` so that its first error is stored, and raised later by `save_last`.

        Use this for work between steps, so that the run saves before it exits with the error.
        """

        def deferred(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                call(*args, **kwargs)
            except Exception as error:
                self.stops.error = self.stops.error or error

        return deferred

    def after_step(self, step: int) -> None:
        """Exchange stop requests. Continue the current save if every rank has finished its part.

        Raises CheckpointError after the last failed attempt to save.
        """
        self.step = step
        self.beat()
        failed, busy = self.saver.status()
        asked, self._asked_about_save = self._asked_about_save, self.saver.busy
        answer = self.agreement.delayed([self.stops.wanted(), failed, busy])
        if answer is None:  # no exchange was pending
            return
        stop, failed, busy = answer
        if failed:
            self.saver.fail()
            self.stop_now()  # the pending exchange would report this failure again, so drop it
        elif asked and not busy:
            self.saver.advance()
            self._asked_about_save = False  # the pending exchange still reports the finished save
        self.reason = self.reason or REASONS.get(stop)

    def stop_now(self) -> bool:
        """Return whether a stop has been requested on any rank. Collective, for use between
        steps."""
        self.beat()
        self.reason = self.reason or REASONS.get(self.agreement.now([self.stops.wanted(), 0, 0])[0])
        return self.reason is not None

    def beat(self) -> None:
        """Send a heartbeat to the watchdog."""
        self.watchdog.beat(self.step)

    def save_if_due(self, step: int, checkpoint: Checkpoint) -> None:
        """If a regular checkpoint is due after `step`, wait for the previous save to complete, then
        start a new one."""
        interval = self.config.checkpoint.interval
        if interval > 0 and step % interval == 0:
            with profiler.record_function("checkpoint"):
                meta = checkpoint()
                self.wait()
                self.saver.begin(meta)

    def save_last(self, checkpoint: Checkpoint) -> None:
        """Save the last step unless it is already saved, and remove the STOP file.

        Raises CheckpointError if the state contains non-finite values. Otherwise, raises the
        deferred error of this rank, if any.
        """
        with profiler.record_function("checkpoint"):
            self._save_last(checkpoint())
        if self.reason is not None and self.stops.first:
            with Aid(f"{STOP} could not be removed, but later starts will ignore it"):
                self.stops.stop_file.unlink(missing_ok=True)
        if self.stops.error is not None:
            raise self.stops.error

    def _save_last(self, meta: Mapping[str, Any]) -> None:
        if self.config.checkpoint.interval > 0:
            self.wait()
            if self.saver.last_saved != meta["step"]:
                self.saver.begin(meta)
                self.wait()
            if self.saver.last_saved != meta["step"]:
                raise CheckpointError(
                    f"the last step ({meta['step']}) could not be saved, because the training "
                    "state is not finite"
                )

    def wait(self) -> None:
        """Wait for a save in progress to complete."""
        self.saver.wait(self._failed_anywhere, self.beat)
        self._asked_about_save = False

    def _failed_anywhere(self, failed: bool) -> bool:
        """Return whether `failed` is true on any rank.

        The call drops the pending exchange that `after_step` started, and therefore exchanges stop
        requests itself.
        """
        stop, failures, _ = self.agreement.now([self.stops.wanted(), int(failed), 0])
        self.reason = self.reason or REASONS.get(stop)
        return failures > 0
