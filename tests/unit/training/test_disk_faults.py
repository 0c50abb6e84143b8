"""Each file operation of a run fails, once or permanently, with the results described in
docs/running.md."""

import errno
import re
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.failing_disk import KINDS, FailingDisk, Fault, compiler
from tests.run_configs import tiny_config
from tests.run_results import metrics_of, same_state, state_of
from tests.token_files import write_token_set
from training.checkpoint.checkpoints import steps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(compiler() is None, reason="no C compiler cc for tests/failing_disk.c"),
]

END, INTERVAL = 20, 7
SETTINGS = [
    f"train.steps={END}",
    "train.global_batch=2",
    "train.sequence_length=16",
    "model.layers=1",
    "model.hidden=32",
    "model.ffn=32",
    f"checkpoint.interval={INTERVAL}",
    "checkpoint.keep_last=1",
    "log.interval=1",
    "monitors.interval=5",
    "validation.samples=2",
]
ERRORS = {"stat": errno.ESTALE, "write": errno.ENOSPC}
"""Maps kinds of calls to the error that is tested. For all other kinds, it is EIO."""
CHANGING = (("-[0-9a-f]{8}(?=/|$)", ""), (r"\.writing-\d+", ".writing"), (r"step_\d+", "step"))
"""Replacements for the parts of paths that differ between saves and between runs."""

PERIOD = 150
"""Number of calls of a kind between two failures. Two attempts to save make fewer calls."""

Case = tuple[str, int, str, bool]
"""The kind, number and path of a call, and whether training has begun."""


class Runs:
    """Runs of the same config with faults, and one run without faults."""

    def __init__(self, folder, disk: FailingDisk) -> None:
        self.disk = disk
        self.arguments = ["--config", str(folder / "config.yaml"), *SETTINGS]
        code, said = disk.run("whole", self.arguments)
        assert code == 0, said
        self.cases = list(self._cases(disk.calls("whole")))
        whole = disk.runs / "whole"
        self.state, self.metrics = state_of(whole, END), metrics_of(whole)

    def _cases(self, calls: list[tuple[str, int, str]]) -> Iterator[Case]:
        """Yield the first and the last call of each kind to each path, and the first such call
        during training.

        The paths of all saves count as the same path.
        """
        begun = next(i for i, call in enumerate(calls) if call[::2] == ("write", "metrics.jsonl"))
        places: dict[tuple[str, str, bool], list[int]] = {}
        for i, (kind, number, path) in enumerate(calls):
            for pattern, text in CHANGING:
                path = re.sub(pattern, text, path)
            places.setdefault((kind, path, i >= begun), []).append(number)
        for (kind, path, training), numbers in places.items():
            for number in sorted({numbers[0], numbers[-1]}):
                yield kind, number, path, training

    def problems(self, case: Case, *, always: bool) -> Iterator[str]:
        """Yield the problems of a run with a fault, and of the run that resumes it."""
        kind, number, path, training = case
        fault = Fault(kind, number, ERRORS.get(kind, errno.EIO), int(always))
        code = int("DONE" in path) if training and not always else None
        yield from self.problems_of(f"{kind}{number}{always}", fault, code)

    def problems_of(self, name: str, fault: Fault, expected: int | None) -> Iterator[str]:
        """Yield the `problems` of a run that must exit with code `expected`. None allows any
        code."""
        run_dir, always = self.disk.runs / name, fault.period == 1
        code, said = self.disk.run(name, self.arguments, fault)
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        if "Traceback" in said:
            yield f"a traceback: {said}"
        if code not in (0, 1, 2) or len(errors) != (code > 0):
            yield f"ended with {code}: {said}"
        taken = len(re.findall(rf"step +\d+/{END} ", said))
        saved = max(steps(run_dir) if run_dir.exists() else [], default=0)
        if expected is not None and (code != expected or saved < END):
            yield f"was ended with {code}: {said}"
        elif code and taken - saved > (2 * INTERVAL if always else 0):  # a save was running
            yield f"lost {taken - saved} steps: {said}"
        if code or saved < END:
            again, said = self.disk.run(name, self.arguments)
            if again:
                yield f"is not continued: {said}"
                return
        yield from self.differences(run_dir, exact=not always)

    def differences(self, run_dir, *, exact: bool) -> Iterator[str]:
        """Yield the differences from the undisturbed run. Lines may be lost unless `exact` is
        true."""
        if different := same_state(state_of(run_dir, END), self.state):
            yield f"{len(different)} tensors differ"
        ours, theirs = metrics_of(run_dir), self.metrics
        if not exact:  # a run that continues has no gradient of the last monitored step
            trained = [without_monitors(line) for line in theirs]
            theirs = [line for line in map(without_monitors, ours) if line in trained]
            ours = [without_monitors(line) for line in ours]
        if ours != theirs:
            yield "metrics differ"


def without_monitors(line):
    """Return the metrics in a line without the metrics of monitors, some of which compare with an
    earlier step."""
    return {name: value for name, value in line.items() if not name.startswith("monitor/")}


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Iterator[FailingDisk]:
    """A failing disk. Reading the config and the token set never fails."""
    folder = tmp_path_factory.mktemp("disk")
    write_token_set(folder / "tokens", tokens=2_000, vocab=120, seed=0)
    tiny_config(str(folder), "adamw")
    with closing(FailingDisk(folder)) as made:
        yield made


@pytest.fixture(scope="module")
def runs(disk) -> Runs:
    """The runs with and without faults."""
    return Runs(disk.runs.parent, disk)


@pytest.mark.parametrize("always", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_fails_costs_no_more_than_the_table_says(kind, always, runs):
    cases = [case for case in runs.cases if case[0] == kind]
    assert cases
    found = {case: list(runs.problems(case, always=always)) for case in cases}
    assert {case: problems for case, problems in found.items() if problems} == {}


@pytest.mark.parametrize("number", range(30, PERIOD, 30))
@pytest.mark.parametrize("kind", ["write", "stat"])
def test_calls_that_fail_now_and_then_cost_nothing(kind, number, runs):
    """Test calls between the first and the last call to a path. Only these kinds have many such
    calls."""
    fault = Fault(kind, number, ERRORS[kind], PERIOD)
    assert list(runs.problems_of(f"{kind}{number} and later", fault, 0)) == []
