"""Report the CPU time of the parts of `make test` and of their slowest files.

Wall-clock time depends on the load of the machine. CPU time measures the cost of a test, although
it, too, doubles on a busy machine. It includes the test process and all of its descendants:
programs started by tests, ranks, and the server that forks them. Files that take too large a share
are named but do not fail the run, because a file is also charged for processes that end during its
tests.
"""

import os
from collections.abc import Iterator
from math import inf
from pathlib import Path
from time import perf_counter

import pytest

LONG = (
    "tests/rehearsal/test_rehearsed_recipes.py",
    "tests/rehearsal/test_small_recipes.py",
    "tests/distributed/test_recipes_on_ranks.py",
    "tests/unit/test_fuzz.py",
    "tests/unit/training/test_disk_faults.py",
    "tests/unit/recipes/test_twins.py",
)
"""The slowest files among the slow tests."""
FIRST = (
    "tests/smoke/test_readme.py",
    "tests/distributed/test_sharded.py",
    "tests/distributed/test_layouts.py",
    "tests/distributed/test_runs.py",
    "tests/distributed/test_state.py",
    "tests/rehearsal/test_programs.py",
    "tests/rehearsal/test_rehearsed_layouts.py",
    "tests/distributed/test_interrupts.py",
    "tests/distributed/test_faults.py",
    "tests/distributed/test_restart.py",
    "tests/unit/training/checkpoint/test_checkpoint.py",
    "tests/unit/training/test_survival.py",
    "tests/unit/spectral/test_kernels.py",
)
"""The slowest files of `make test`, which may take more than `LARGEST`."""
STARTS = {file: i for i, file in enumerate((*LONG, *FIRST))}
"""Files to start first, so that none of them is left running alone at the end."""

SHOWN = 10
WHOLE = 100
"""Minimum number of files for a run to count as a complete `make test`."""
LARGEST = 0.04
"""Maximum share of a complete run for files not in `FIRST`."""
NAME = "processor_seconds"
TICKS = os.sysconf("SC_CLK_TCK")
PROCESSORS = len(os.sched_getaffinity(0))


def processor_seconds() -> float:
    """Return the CPU seconds of this process and all of its descendants, including those that have
    exited."""
    waiting, ticks = [os.getpid()], 0
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        try:
            # Skip the first two fields, because the second may contain spaces. Times are 14 to 17.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            for task in (folder / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except (OSError, ProcessLookupError):
            continue  # the process has exited, and its time was added to its parent's
        ticks += sum(map(int, fields[11:15]))
    return ticks / TICKS


def turn(file: str) -> int:
    """Return the sort key that determines when a file starts."""
    return STARTS.get(file, len(STARTS))


class ProcessorTime:
    """Measures every test in its own process, and sums times by file in the reporting process."""

    def __init__(self) -> None:
        self.files: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Record the time before a test's first fixture."""
        item.stash[START] = processor_seconds(), perf_counter()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Attach a test's seconds to its last report, which is sent to the reporting process."""
        if call.when == "teardown" and START in item.stash:
            spent, start = item.stash[START]
            # When a process exits, its previous seconds are added to its parent's or, if the parent
            # does not wait for it, lost.
            most = (perf_counter() - start) * PROCESSORS
            seconds = min(max(0.0, processor_seconds() - spent), most)
            item.user_properties.append((NAME, seconds))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test's seconds to its file."""
        if report.when == "teardown":
            seconds = sum(value for name, value in report.user_properties if name == NAME)
            file = report.nodeid.partition("::")[0]
            self.files[file] = self.files.get(file, 0.0) + float(seconds)

    def too_slow(self) -> list[str]:
        """Return the files not in `FIRST` that take more than their share of a complete run."""
        most = LARGEST * sum(self.files.values()) if len(self.files) >= WHOLE else inf
        return [file for file, spent in self.files.items() if spent > most and file not in FIRST]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the total for each part and the slowest files."""
        write = terminalreporter.write_line
        parts: dict[str, float] = {}
        for file, seconds in self.files.items():
            part = "/".join(file.split("/")[:2])
            parts[part] = parts.get(part, 0.0) + seconds
        for part in sorted(parts):
            write(f"{parts[part]:8.1f} s  {part}")
        write(f"{sum(parts.values()):8.1f} CPU seconds in tests, most of them in")
        for file in sorted(self.files, key=self.files.__getitem__, reverse=True)[:SHOWN]:
            write(f"{self.files[file]:8.1f} s  {file}")
        for file in self.too_slow():
            write(f"note: {file} takes more than {LARGEST:.0%}: mark cases slow, or list it")


START = pytest.StashKey[tuple[float, float]]()
