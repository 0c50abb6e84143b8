"""Profile selected steps: the timeline of a rank's operations, as a Perfetto trace.

If profiling fails, the run continues. Profiling does not affect results.
"""

import contextlib
import gzip
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch
from torch import profiler

from parallel.comm.collectives import from_all
from parallel.comm.groups import Groups
from parallel.error_text import first_line, os_error_text
from training.config import Config
from training.config.schema import ProfileConfig

FOLDER: Final = "profile"
"""Subfolder of the run folder for profiles."""
LARGEST_HISTORY: Final = 1_000_000
"""Maximum number of allocations that a memory snapshot records."""


def profiled_steps(section: ProfileConfig, after: int, last: int) -> range:
    """Return the steps to profile in a run that resumes after step `after` and ends at `last`."""
    return range(max(section.first, after + 1), min(section.first + section.steps - 1, last) + 1)


def announcement(config: Config, after: int) -> str | None:
    """Return a note on the profiled steps of a run that resumes after step `after`. Return None if
    the config does not enable profiling."""
    section, last = config.log.profile, config.train.last
    if section is None:
        return None
    steps = profiled_steps(section, after, last)
    requested = range(section.first, section.first + section.steps)
    ranks = ", ".join(map(str, section.ranks))
    if requested[0] > last:
        return (
            f"profile: none, because {_named(requested)} are past step {last}, the run's last step"
        )
    if not steps:
        return (
            f"profile: none, because {_named(requested)} were taken before this start; to profile "
            "again, increase log.profile.first"
        )
    cut = "" if len(steps) == len(requested) else f" of the requested {_named(requested)}"
    folder = Path(config.run.dir) / FOLDER
    return f"profile: {_named(steps)}{cut}, rank {ranks}, in {folder}"


def _named(steps: range) -> str:
    return f"steps {steps[0]} to {steps[-1]}"


class StepProfile:
    """Profiles this rank's steps, if the config enables profiling. All ranks call its methods, even
    ranks that are not profiled."""

    def __init__(
        self, config: Config, groups: Groups, after: int, note: Callable[[str, int, str], None]
    ) -> None:
        """The run resumes after step `after`; `note` is called with the kind, step and text of an
        event."""
        section = config.log.profile
        self.folder = Path(config.run.dir) / FOLDER
        self.rank, self.host = groups.rank, groups.host
        self.cuda = groups.device.type == "cuda"
        self.note = note
        self.steps = range(0)
        if section is not None:
            self.steps = profiled_steps(section, after, config.train.last)
        self.profiled = section is not None and self.rank in section.ranks
        self.memory = section is not None and section.memory
        self._session: profiler.profile | None = None
        self._span: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self._messages: list[str] = []

    def before(self, step: int) -> None:
        """Start profiling before the first step to profile, and open the step's trace range."""
        if not self.profiled or step not in self.steps or self._messages:
            return
        with self._failing():
            if self._session is None:
                activities = [profiler.ProfilerActivity.CPU]
                activities += [profiler.ProfilerActivity.CUDA] * self.cuda
                if self.memory:
                    torch.cuda.memory._record_memory_history(max_entries=LARGEST_HISTORY)
                session = profiler.profile(activities=activities, record_shapes=True)
                session.start()
                self._session = session
            self._span = profiler.record_function(f"step {step}")
            self._span.__enter__()

    def after(self, step: int) -> None:
        """Close the step's trace range. After the last profiled step, write the files."""
        with self._failing():
            self._span.__exit__(None, None, None)
        self._span = contextlib.nullcontext()
        if self.steps and step >= self.steps[-1]:
            self.finish(step)

    def finish(self, step: int) -> None:
        """Write the profiles of steps up to `step` to files, and report the paths of the files.
        Collective."""
        if not self.steps or step < self.steps[0]:
            return
        self._write(range(self.steps[0], step + 1))
        self.steps = range(0)
        for text in (text for texts in from_all(self._messages, self.host) for text in texts):
            self.note("warning" if text.startswith("warning") else "profile", step, text)

    def close(self) -> None:
        """Stop an unfinished profile after the run has failed, without writing a trace."""
        session, self._session = self._session, None
        if session is not None:
            with self._failing():
                session.stop()
            self._forget_allocations()
            print(f"warning: no profile of rank {self.rank}: the run failed", flush=True)

    def _write(self, steps: range) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        name = f"steps_{steps[0]}-{steps[-1]}_rank_{self.rank}"
        with self._failing():
            session.stop()
            self.folder.mkdir(exist_ok=True)
            path = write_trace(session, self.folder / f"{name}.json.gz")
            what = f"profile of {_named(steps)} on rank {self.rank}"
            self._messages.append(
                f"{what}: {path}, {_megabytes(path)}, for https://ui.perfetto.dev"
            )
        if self.memory:
            with self._failing():
                path = self.folder / f"{name}.memory.pickle"
                torch.cuda.memory._dump_snapshot(str(path))
                what = f"memory snapshot of rank {self.rank}: {path}, {_megabytes(path)}"
                self._messages.append(f"{what}, for https://pytorch.org/memory_viz")
            self._forget_allocations()

    def _forget_allocations(self) -> None:
        if self.memory:
            with self._failing():
                torch.cuda.memory._record_memory_history(enabled=None)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Context manager that turns an exception into a warning. The exception ends the profile,
        but not the run."""
        try:
            yield
        except Exception as error:
            text = os_error_text(error) if isinstance(error, OSError) else first_line(error)
            self._messages.append(
                f"warning: no profile of rank {self.rank}: {text}; the run continues"
            )


def write_trace(session: profiler.profile, path: Path) -> Path:
    """Write the trace of a finished session to a compressed file and return its path.

    Raises OSError if the disk is full. Raises RuntimeError if other code has stopped the profiler,
    so that the trace is empty. Exporting an empty trace would abort the process.
    """
    results = None if session.profiler is None else session.profiler.kineto_results
    if results is None or not results.events():
        raise RuntimeError("the profiler recorded no events")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as folder:
        plain, compressed = Path(folder) / "trace.json", Path(folder) / path.name
        session.export_chrome_trace(str(plain))
        if not plain.exists():  # the profiler prints to stderr instead of raising
            raise OSError(None, "the profiler could not write its trace", str(path))
        with plain.open("rb") as file, gzip.open(compressed, "wb", compresslevel=5) as target:
            shutil.copyfileobj(file, target)
        compressed.replace(path)
    return path


def _megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"
