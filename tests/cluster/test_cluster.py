"""The cluster itself: nothing of it stays when its tests end, however they do."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, missing
from tests.cluster.network import until
from tests.paths import ROOT

HELD = """
import signal
from tests.cluster.cluster import Cluster
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
with Cluster() as made:
    print(made.folder, flush=True)
    signal.pause()
"""


def processes_of(folder: str) -> list[str]:
    """Return the command lines of processes with a file of the folder in their environment."""
    found = []
    for task in Path("/proc").glob("[0-9]*"):
        try:
            if folder.encode() in (task / "environ").read_bytes():
                found.append((task / "cmdline").read_text())
        except OSError:
            continue  # it has ended meanwhile
    return found


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_one_that_has_made_the_cluster(cluster: Cluster, way: int) -> None:
    words = [sys.executable, "-c", HELD]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        folder = maker.stdout.readline().strip()
        assert len(processes_of(folder)) > 6
        maker.send_signal(way)
        maker.wait(120)
    until(lambda: processes_of(folder) == [], "the end of all processes", 60)
    assert folder not in Path("/proc/mounts").read_text()
    assert os.path.exists(folder) is (way == signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def test_what_is_missing_is_said(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing() == ""
    os.seteuid(65534)
    try:
        assert missing() == "nodes in namespaces need Linux and root"
    finally:
        os.seteuid(0)
    monkeypatch.setenv("PATH", "/nowhere")  # what is in /usr/sbin is found all the same
    assert missing().startswith("Debian's packages are missing: apt-get install ")
    assert "slurm-client" in missing()
