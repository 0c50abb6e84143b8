"""How the tests start ranks, and what is said of one that fails or hangs."""

import pytest

from tests.launch import run_on_ranks

WORKERS = "tests.distributed.launch_workers"


def test_ranks_find_each_other_and_answer_in_order(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")  # a test before may have left it
    found = run_on_ranks(3, WORKERS, "summed", {})
    assert found == [{"rank": rank, "threads": 1, "sum": 3} for rank in range(3)]


def test_a_failed_rank_ends_the_others_and_what_all_said_is_shown():
    with pytest.raises(AssertionError) as failed:
        run_on_ranks(2, WORKERS, "fail", {"rank": 1})
    said = str(failed.value)
    assert said.startswith("rank 1 ended with 1")
    assert "rank 0 is here" in said and "ValueError: as it was asked to" in said


def test_ranks_that_hang_are_ended():
    with pytest.raises(AssertionError, match="not done in 2 seconds"):
        run_on_ranks(2, WORKERS, "fail", {"rank": 2}, timeout=2)


def test_warnings_of_our_calls_are_errors_on_ranks_too():
    with pytest.raises(AssertionError, match="FutureWarning: there is a newer way"):
        run_on_ranks(1, WORKERS, "warn", {})
