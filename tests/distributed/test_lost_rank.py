"""If a rank has exited, a collective raises a CollectiveError that names this rank."""

from tests.launch import run_on_ranks


def test_a_collective_without_the_other_rank_is_named():
    said, _ = run_on_ranks(2, "tests.distributed.lost_workers", "left_alone", {})
    assert len(said) == 7
    for what, text in said.items():
        assert " failed on rank 0: " in text and text.count("failed on rank") == 1, what
