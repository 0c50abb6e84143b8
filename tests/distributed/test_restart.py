"""torchrun restarts a run after ranks are killed, and the run ends as if it had not been
disturbed."""

from pathlib import Path

import pytest

from tests.killed_runs import killed_run


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_ranks_are_started_again_and_change_nothing(kills: int, tmp_path: Path) -> None:
    different, steps, last = killed_run(tmp_path, kills, forks=kills == 1)
    assert different == [] and len(steps) == kills
    assert steps[0] > 0 and steps == sorted(steps) and steps[-1] < last
