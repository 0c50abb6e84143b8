"""The processes in which ranks are rehearsed, once for all tests of a process of pytest."""

import os
from collections.abc import Iterator

import pytest

from training.rehearsal.fake_driver import GuardError
from training.rehearsal.processes import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """Processes side by side: as many as there are processors, one where pytest is beside itself.

    Skips with the reason where there is no C++ compiler.
    """
    beside = "PYTEST_XDIST_WORKER" in os.environ
    try:
        found = Processes(1 if beside else None).__enter__()
    except GuardError as error:
        pytest.skip(str(error))
    yield found
    found.__exit__(None, None, None)
