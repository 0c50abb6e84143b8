"""A save is killed, fails once or runs out of disk space, at each of its disk accesses."""

from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_on_ranks
from tests.token_files import write_token_set

EVERY_POINT = pytest.param(1, id="every point", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])


@pytest.fixture(scope="module", params=[EVERY_POINT, pytest.param(16, id="some points")])
def report(request, tmp_path_factory) -> dict[str, Any]:
    """Outcomes of all faults."""
    folder: Path = tmp_path_factory.mktemp("faults")
    write_token_set(folder / "tokens", tokens=2_000, vocab=120, seed=0)
    arguments = {"folder": str(folder), "stride": request.param}
    return run_on_ranks(1, "tests.distributed.fault_workers", "report", arguments, timeout=3000)[0]


def test_no_fault_loses_or_loads_anything_wrong(report):
    assert report["points"] >= 50
    assert [fault for fault in report["faults"] if fault["problems"]] == []


def test_faults_hit_before_and_after_the_checkpoint_is_there(report):
    assert {fault["from"] for fault in report["faults"]} == {2, 3}
    for fault in report["faults"]:
        if fault["fault"]["action"] == "full disk" and fault["fault"]["process"] == "writer":
            assert len(fault["said"]) == 1


def test_what_fails_once_costs_no_step(report):
    """A killed writer costs no step, because the save is repeated."""
    for fault in report["faults"]:
        kind = fault["fault"]["process"], fault["fault"]["action"]
        if "error once" in kind or kind == ("writer", "kill"):
            assert fault["from"] == 3 and fault["said"] == []


def test_a_folder_that_cannot_be_written_to_is_named(report):
    """The run prints a single clear line, and resumes once it can write again."""
    assert [found["place"] for found in report["places"]] == [".", "checkpoints"]
    for found in report["places"]:
        assert found["problems"] == []
        assert found["from"] == 2
        (line,) = found["said"]
        assert "Read-only file system" in line
