"""A rank that is slower than the others is an event of the run."""

import pytest

from tests.launch import run_on_ranks
from tests.run_configs import tiny_config
from tests.token_files import write_token_set


@pytest.mark.slow
def test_a_slow_rank_is_named_after_fifty_steps(tmp_path):
    write_token_set(tmp_path / "tokens", tokens=8_000, vocab=120, seed=0)
    tiny_config(str(tmp_path), "adamw")
    arguments = {"folder": str(tmp_path)}
    for events in run_on_ranks(2, "tests.distributed.watch_workers", "slowed", arguments):
        [(kind, step, text)] = events
        assert (kind, step) == ("straggler", 50) and text.startswith("rank 1 (host ")
