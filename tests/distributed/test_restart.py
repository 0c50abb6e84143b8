"""A run under torchrun whose ranks are killed is started again, and ends as if nothing had been."""

import pytest

from tests.killed_runs import killed_run


@pytest.mark.timeout(1200)
def test_killed_ranks_are_started_again_and_change_nothing(tmp_path):
    found = killed_run(tmp_path, 2)
    assert found["different"] == [] and len(found["kills"]) == 2
    assert found["steps"] > found["kills"][1]["step"] >= found["kills"][0]["step"] > 0
    # They do not wait for the time-out of collectives, of 600 s.
    assert all(kill["gone"] < 60 for kill in found["kills"])
