"""Heartbeat of a run, and stack traces of hanging ranks."""

import contextlib
import faulthandler
import json
import os
import time
from pathlib import Path
from typing import IO, Final

from parallel.disk import replace_file
from training.config.schema import WatchdogConfig
from training.errors import Aid

HEARTBEAT: Final = "heartbeat.json"
STACKS: Final = "stacks"
PAUSE: Final = 10.0
"""Seconds between updates of the heartbeat."""


class Watchdog:
    """Watchdog of one rank; `beat` records progress.

    Rank 0 updates `heartbeat.json`, which contains step, time (seconds since 1970) and process id.
    After `hang_seconds` without progress, a thread of each rank writes Python stack traces to
    `stacks/rank_00000.txt` and so on; later the timeout of the process groups ends the run. If a
    file cannot be written, the run continues.
    """

    def __init__(
        self, run_dir: str | Path, config: WatchdogConfig, *, rank: int, timeout_seconds: float
    ) -> None:
        """`timeout_seconds` is the timeout of the process groups; stacks are written earlier."""
        self.folder = Path(run_dir)
        self.rank = rank
        self.limit: float | None = None
        if config.hang_seconds is not None:
            self.limit = min(config.hang_seconds, timeout_seconds / 2)
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
                with contextlib.suppress(OSError):  # other ranks have files in the folder
                    self.stacks.parent.rmdir()
            elif self.rank == 0:
                print(f"the run made no progress for a while; stack traces: {self.stacks.parent}")

    def beat(self, step: int) -> None:
        """Record progress after `step` steps."""
        now = time.monotonic()
        if self.limit and self._file is not None and now - self._armed > self.limit / 10:
            # Not called after every step, because each call starts a thread.
            self._armed = now
            faulthandler.dump_traceback_later(self.limit, file=self._file)
        if self.rank == 0 and now - self._written > PAUSE:
            self._written = now
            content = {"step": step, "time": time.time(), "pid": os.getpid()}
            with self._heartbeat_aid:
                replace_file(self.folder / HEARTBEAT, json.dumps(content) + "\n")
