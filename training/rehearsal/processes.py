"""Run rehearsals in parallel, each in its own process.

The processes are forked from multiprocessing's fork server, which imports all modules once.
"""

import multiprocessing
import os
import pickle
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from training.rehearsal import fake_driver
from training.rehearsal.program import ROOT
from training.report.text import progress

if TYPE_CHECKING:  # imports torch, which must be imported after the device is created
    from training.rehearsal.rank import Job, RankReport

DEVICE: Final = "training.rehearsal.process_device"
"""Module that prepares a rehearsal process when it is imported."""


class RehearsalError(RuntimeError):
    """Raised when a rehearsal process exits without a report."""


def perform(jobs: Sequence["Job"], max_processes: int | None = None) -> list["RankReport"]:
    """Run every job in its own process, and return the reports in order.

    At most `max_processes` processes run at a time, by default one per processor.

    Raises GuardError if this machine cannot run rehearsals, and RehearsalError if a job exits
    without a report.
    """
    reports = performed([pickle.dumps(job) for job in jobs], max_processes)
    return [pickle.loads(report) for report in reports]


def performed(jobs: Sequence[bytes], max_processes: int | None = None) -> list[bytes]:
    """Run pickled jobs and return their pickled reports, without importing the jobs' modules in
    this process."""
    fake_driver.built()
    context = multiprocessing.get_context("forkserver")
    start_server()
    limit = max_processes or len(os.sched_getaffinity(0))
    running: dict[int, tuple[ForkServerProcess, Path]] = {}
    with tempfile.TemporaryDirectory(prefix="rehearsals-") as folder:
        paths = [Path(folder) / f"{i}.out" for i in range(len(jobs))]
        waiting = deque(zip(jobs, paths, strict=True))
        try:
            with progress(lambda: places(paths)):
                while waiting or running:
                    while waiting and len(running) < limit:
                        job, path = waiting.popleft()
                        process = context.Process(target=rehearse, args=(job, path))
                        process.start()
                        running[process.sentinel] = process, path
                    for sentinel in wait(list(running)):
                        check(*running.pop(int(sentinel)))  # type: ignore[arg-type]
        finally:
            for process, _ in running.values():
                process.kill()
                process.join()
        return [path.read_bytes() for path in paths]


def places(paths: Sequence[Path]) -> str:
    """Return the number of jobs that have written their report to `paths`, and the progress of the
    other jobs, as text."""
    done = sum(path.exists() for path in paths)
    here = [path.with_suffix(".at") for path in paths if not path.exists()]
    texts = [path.read_text(encoding="utf-8") for path in here if path.exists()]
    return "; ".join([f"{done} of {len(paths)} ranks are rehearsed", *filter(None, texts)])


def start_server() -> None:
    """If this process's fork server is not running, start it with the project root in its
    PYTHONPATH."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before]))
    forkserver.set_forkserver_preload([DEVICE])
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def check(process: ForkServerProcess, path: Path) -> None:
    """If the exit code of `process` is nonzero, raise RehearsalError with the output of
    `process`."""
    process.join()
    if process.exitcode:
        printed = path.with_suffix(".txt").read_text(encoding="utf-8", errors="replace")
        raise RehearsalError(
            f"a rehearsal ended with exit code {process.exitcode}: {printed.strip()[-2000:]}"
        )


def rehearse(job: bytes, path: Path) -> None:
    """Rehearse one job, write its report to `path`, and exit.

    The process also exits if its parent process exits.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: os._exit(bool(wait([parent.sentinel]))), daemon=True).start()
    output = os.open(path.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 1
    try:
        __import__(DEVICE)
        at = path.with_suffix(".at")
        report = pickle.loads(job).perform(lambda text: at.write_text(text, encoding="utf-8"))
        path.write_bytes(pickle.dumps(report))
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        # Skip Python's cleanup: fake tensors and their modes go away with the process.
        os._exit(status)
