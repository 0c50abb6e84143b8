"""A collective raises a CollectiveError that names the rank that has left."""

import pytest

from tests.launch import run_on_ranks


@pytest.mark.parametrize(
    "what", ["from_all", "first_rank", "on_first", "settings", "owners", "activations", "copies"]
)
def test_a_collective_without_the_other_rank_is_named(what):
    said, _ = run_on_ranks(2, "tests.distributed.lost_workers", "left_alone", {"what": what})
    assert " failed on rank 0: " in said and said.count("failed on rank") == 1
