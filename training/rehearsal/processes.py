"""Several rehearsals side by side, each in its own process."""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from training.rehearsal.fake_driver import GuardError
from training.rehearsal.program import ROOT
from training.rehearsal.rank import Job, RankReport


class RehearsalError(RuntimeError):
    """A process that rehearses ended without a report."""


class Processes:
    """Context in which jobs are performed, as many at a time as there are processors.

    Raises GuardError on entering if this machine cannot rehearse.
    """

    def __init__(self, side_by_side: int | None = None) -> None:
        self.side_by_side = side_by_side or len(os.sched_getaffinity(0))
        self._folder = tempfile.TemporaryDirectory(prefix="rehearsals-")
        self._count = 0

    def __enter__(self) -> "Processes":
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._worker = worker = subprocess.Popen(
            [sys.executable, "-m", "training.rehearsal.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
        )
        assert worker.stdin is not None and worker.stdout is not None
        self._input, self._output = worker.stdin, worker.stdout
        answer = self._read()
        if answer != "ready":
            self.__exit__()
            raise GuardError(answer.removeprefix("error "))
        return self

    def __exit__(self, *_: object) -> None:
        self._input.close()
        self._worker.wait()
        self._output.close()
        self._folder.cleanup()

    def perform(self, jobs: Sequence[Job]) -> list[RankReport]:
        """The report of every job, in order. Raises RehearsalError if there is none of one."""
        waiting = [self._prepared(job) for job in jobs]
        paths = list(waiting)
        under_way = 0
        while waiting or under_way:
            while waiting and under_way < self.side_by_side:
                self._input.write(f"{waiting.pop(0)}\n")
                self._input.flush()
                under_way += 1
            name, status = self._read().rsplit(" ", 1)
            path = Path(name)
            if path not in paths:
                continue  # a job of a call that was interrupted
            under_way -= 1
            if status != "0":
                output = (
                    path.with_suffix(".txt").read_text(encoding="utf-8", errors="replace").strip()
                )
                raise RehearsalError(f"a rehearsal ended with {status}: {output[-2000:]}")
        return [pickle.loads(path.with_suffix(".out").read_bytes()) for path in paths]

    def _prepared(self, job: Job) -> Path:
        """The file of a job that is to be performed."""
        self._count += 1
        path = Path(self._folder.name) / f"{self._count}.job"
        path.write_bytes(pickle.dumps(job))
        return path

    def _read(self) -> str:
        """The worker's next line. Raises RehearsalError if it is gone."""
        line = self._output.readline()
        if not line:
            raise RehearsalError(f"the rehearsing process ended with {self._worker.wait()}")
        return line.rstrip("\n")
