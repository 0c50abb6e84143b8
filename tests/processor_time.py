"""Processor time of every test file, and a limit on it for machines that are quiet.

Wall time says how busy a machine is; processor time says what a test costs. The sum covers the test
process and all its descendants: programs that tests start, and ranks with the server that forks
them. `--processor-limit 0` reports without a limit.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ALLOWED: dict[str, float] = {
    "tests/distributed/": 85.0,  # each starts ranks, for every layout that it compares
    "tests/rehearsal/": 80.0,  # a process for each rank that differs
    "tests/smoke/": 60.0,  # whole runs, as a user starts them
    "tests/unit/scripts/test_export.py": 25.0,  # runs, and transformers' models of what they save
    "tests/unit/scripts/test_kills.py": 40.0,  # three commands, whole, killed and given again
    "tests/unit/scripts/test_prepare_data.py": 45.0,  # the embedded corpus, whole
    "tests/unit/scripts/test_report.py": 25.0,  # two runs with all monitors
    "tests/unit/scripts/test_study.py": 50.0,  # studies of real runs
    "tests/unit/spectral/test_kernels.py": 40.0,  # Triton's interpreter
    "tests/unit/training/checkpoint/test_checkpoint.py": 75.0,  # a run for each damage
    "tests/unit/training/test_survival.py": 40.0,
}
"""Processor seconds of the files that may take more than the limit, by path in the repository; a
folder stands for each of its files. About 1.5 times what a loaded machine of two cores measured."""

FIRST = (
    "tests/distributed/test_layouts.py",
    "tests/distributed/test_runs.py",
    "tests/distributed/test_state.py",
    "tests/rehearsal/test_programs.py",
    "tests/rehearsal/test_layouts.py",
    "tests/rehearsal/test_command.py",
    "tests/rehearsal/test_times.py",
    "tests/rehearsal/test_mutants.py",
    "tests/smoke/test_restart.py",
    "tests/unit/training/checkpoint/test_checkpoint.py",
    "tests/unit/training/test_survival.py",
    "tests/unit/scripts/test_prepare_data.py",
    "tests/unit/scripts/test_study.py",
    "tests/unit/scripts/test_kills.py",
    "tests/unit/scripts/test_export.py",
    "tests/unit/spectral/test_kernels.py",
    "tests/unit/spectral/test_memory.py",
)
"""The dearest files. They begin first, so that no worker is left alone with one at the end."""

SHOWN = 10
NAME = "processor_seconds"
TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds() -> float:
    """Processor seconds of this process and all its descendants so far, ended ones included."""
    waiting, ticks = [os.getpid()], 0
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        try:
            # Fields from the third on, as the second may hold spaces: times are 14 to 17.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            for task in (folder / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except (OSError, ProcessLookupError):
            continue  # ended meanwhile: its parent has its time
        ticks += sum(map(int, fields[11:15]))
    return ticks / TICKS


def turn(file: str) -> int:
    """Return when a file of tests begins, least first."""
    return FIRST.index(file) if file in FIRST else len(FIRST)


class ProcessorTime:
    """Measures every test where it runs, and sums by file where the session is reported."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.files: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Take the time before the first fixture of a test."""
        item.stash[START] = processor_seconds()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Add the seconds of a test to its last report, which also crosses processes."""
        if call.when == "teardown" and START in item.stash:
            item.user_properties.append((NAME, processor_seconds() - item.stash[START]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Sum the seconds of a file."""
        if report.when == "teardown":
            seconds = sum(value for name, value in report.user_properties if name == NAME)
            file = report.nodeid.partition("::")[0]
            self.files[file] = self.files.get(file, 0.0) + float(seconds)

    def allowed(self, file: str) -> float:
        """Return how many seconds a file may take."""
        return next((s for path, s in ALLOWED.items() if file.startswith(path)), self.limit)

    def over(self) -> dict[str, float]:
        """Return the seconds of the files that take more than they may."""
        if not self.limit:
            return {}
        return {
            file: seconds for file, seconds in self.files.items() if seconds > self.allowed(file)
        }

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a session in which a file takes more than it may."""
        if self.over() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the sum, the dearest files and those over the limit."""
        write = terminalreporter.write_line
        write(f"{sum(self.files.values()):.0f} processor seconds in tests, most of them in")
        shown = None if terminalreporter.verbosity > 0 else SHOWN
        for file in sorted(self.files, key=self.files.__getitem__, reverse=True)[:shown]:
            write(f"{self.files[file]:8.1f} s  {file}")
        for file, seconds in self.over().items():
            write(
                f"FAILED {file} takes {seconds:.1f} processor seconds, "
                f"at most {self.allowed(file):g} are allowed: make it slow or smaller"
            )


START = pytest.StashKey[float]()
