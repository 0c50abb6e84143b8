"""Fixtures: the cluster, and the clone in which the tests run."""

import pytest

from tests.cluster.cluster import Cluster, missing
from tests.commands import copy_repository


@pytest.fixture(scope="session")
def cluster():
    """A SLURM cluster of two nodes. If this machine cannot run one, the tests are skipped."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster() as made:
        yield made


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory):
    """The files that git would clone, in a separate folder."""
    folder = tmp_path_factory.mktemp("clone")
    copy_repository(folder)
    return folder
