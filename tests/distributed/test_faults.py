"""A save is killed, or meets a full disk, at every point where it touches the disk."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.launch import ROOT, environment
from tests.token_files import write_token_set

pytestmark = pytest.mark.timeout(1200)


EVERY_POINT = pytest.param(1, id="every point", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[EVERY_POINT, pytest.param(12, id="some points")])
def report(request, tmp_path_factory) -> dict[str, Any]:
    """The report of tests/distributed/fault_workers.py."""
    folder: Path = tmp_path_factory.mktemp("faults")
    write_token_set(folder / "tokens", tokens=2_000, vocab=120, seed=0)
    command = [sys.executable, "-m", "tests.distributed.fault_workers"]
    command += [str(folder), str(request.param)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def test_no_fault_loses_or_loads_anything_wrong(report, capsys):
    kinds = Counter(
        (f["fault"]["process"], f["fault"]["action"], f["from"]) for f in report["faults"]
    )
    with capsys.disabled():
        print(f"\n{len(report['faults'])} faults at {sum(report['points'].values())} points:")
        for (process, action, step), count in sorted(kinds.items()):
            print(f"  {count:3} times {action} of the {process}: continued from step {step}")
    assert sum(report["points"].values()) >= 50
    assert [fault for fault in report["faults"] if fault["problems"]] == []


def test_faults_hit_before_and_after_the_checkpoint_is_there(report):
    assert {fault["from"] for fault in report["faults"]} == {2, 3}
    for fault in report["faults"]:
        if fault["fault"]["process"] == "writer" or fault["fault"]["action"] == "full disk":
            assert len(fault["said"]) == 1


@pytest.mark.parametrize(
    "place", ["full file system", "read-only run folder", "read-only checkpoints"]
)
def test_a_place_that_cannot_be_written_to(report, place):
    """The run says one clear line, and continues once there is room again."""
    (found,) = (each for each in report["places"] if each["place"] == place)
    if "skipped" in found:
        pytest.skip(f"{found['skipped']}; the faults above inject what these places answer")
    assert found["problems"] == []
    (line,) = found["said"]
    assert ("Read-only file system" if "read-only" in place else "No space left") in line
    assert found["from"] == 2
