"""Rehearsals of the tests: in forks of one process for all tests of a process of pytest."""

import os
from functools import partial

import pytest

from tests.rehearsal.programs import Perform
from training.rehearsal import fake_driver, processes


@pytest.fixture(scope="session")
def perform() -> Perform:
    """`processes.perform`, of one job at a time where pytest is beside itself.

    Skips with the reason without a C++ compiler.
    """
    try:
        fake_driver.built()
    except fake_driver.GuardError as error:
        pytest.skip(str(error))
    beside = "PYTEST_XDIST_WORKER" in os.environ
    return partial(processes.perform, side_by_side=1 if beside else None)
