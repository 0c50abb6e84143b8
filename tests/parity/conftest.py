"""Fixtures of the parity tests: a world of one process."""

from collections.abc import Iterator

import pytest

from parallel.comm import groups as process_groups


@pytest.fixture
def world() -> Iterator[process_groups.Groups]:
    """Process groups of one gloo process."""
    yield process_groups.initialize()
    process_groups.shutdown()
