"""Rehearsals of the tests: in forks of one process for all tests of a process of pytest."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.rehearsal.programs import Perform
from training.rehearsal import fake_driver, processes
from training.rehearsal.rank import Job, RankReport


@pytest.fixture(scope="session")
def apart() -> Iterator[ProcessPoolExecutor]:
    """A process for rehearsals, whose fork server they prepare: the fork server of this process may
    be that of tests/launch.py, which has imported torch.

    Skips with the reason without a C++ compiler.
    """
    try:
        fake_driver.built()
    except fake_driver.GuardError as error:
        pytest.skip(str(error))
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        yield executor


@pytest.fixture(scope="session")
def perform(apart: ProcessPoolExecutor) -> Iterator[Perform]:
    """`processes.perform`, also of `rehearse`, of one job at a time where pytest is beside
    itself."""
    most = 1 if "PYTEST_XDIST_WORKER" in os.environ else None

    def performed(jobs: Sequence[Job]) -> list[RankReport]:
        return apart.submit(processes.perform, jobs, most).result()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.rehearsal.rehearse.perform", performed)
        yield performed
