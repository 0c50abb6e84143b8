"""The cluster of all tests of this folder, and the times in which runs were repaired."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scripts.bench.measure import record, write_json
from tests.cluster.cluster import Cluster, missing
from tests.cluster.repairs import Repairs
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


@pytest.fixture(scope="session")
def repairs() -> Iterator[Repairs]:
    """Times of repairs, which go to the file that REPAIRS names."""
    collected = Repairs()
    yield collected
    path = os.environ.get("REPAIRS")
    if path and collected.taken:
        content = {"command": f"make test-cluster REPAIRS={path}", "repairs": collected.taken}
        write_json(Path(path), record("make test-cluster", [], torch.device("cpu"), content))
