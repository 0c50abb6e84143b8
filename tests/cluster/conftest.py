"""The cluster of all tests of this folder, and the clone that they run in."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, missing
from tests.commands import copy_repository


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A SLURM of two nodes; skips where there can be none."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster() as made:
        yield made


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git would clone, in a folder of their own."""
    folder = tmp_path_factory.mktemp("clone")
    copy_repository(folder)
    return folder
