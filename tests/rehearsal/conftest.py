"""Rehearsals in tests. All tests of a pytest process use forks of the same process."""

import os
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from training.rehearsal import fake_driver, processes
from training.rehearsal.rank import Job, RankReport


@pytest.fixture(scope="session")
def apart() -> Iterator[ProcessPoolExecutor]:
    """A process without torch, whose fork server is prepared for rehearsals. The fork server of
    this process may belong to tests/launch.py, which has imported torch.

    If there is no C++ compiler, the test is skipped with the reason.
    """
    try:
        fake_driver.built()
    except fake_driver.GuardError as error:
        pytest.skip(str(error))
    with ProcessPoolExecutor(1, get_context("spawn")) as executor:
        yield executor


@pytest.fixture(scope="session")
def perform(apart: ProcessPoolExecutor):
    """`processes.perform`, which `rehearse` then uses, too. With several pytest processes, it runs
    one job at a time."""
    most = 1 if "PYTEST_XDIST_WORKER" in os.environ else None

    def performed(jobs: Sequence[Job]) -> list[RankReport]:
        given = [pickle.dumps(job) for job in jobs]
        return [*map(pickle.loads, apart.submit(processes.performed, given, most).result())]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.rehearsal.rehearse.perform", performed)
        yield performed
