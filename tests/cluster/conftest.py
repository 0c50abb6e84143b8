"""The cluster of all tests of this folder, and the clone that they run in."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, missing
from tests.paths import ROOT


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
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, folder / name)
    return folder
