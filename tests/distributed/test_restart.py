"""A run under torchrun whose ranks are killed is started again, and ends as if nothing had been."""

import json

import pytest

from scripts.bench.restart import main


@pytest.mark.timeout(1200)
def test_killed_ranks_are_started_again_and_change_nothing(tmp_path, capsys):
    output = tmp_path / "restart.json"
    assert main(["--kills", "2", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["different"] == [] and len(found["kills"]) == 2
    assert found["steps"] > found["kills"][1]["step"] >= found["kills"][0]["step"] > 0
    # They do not wait for the time-out of collectives, of 600 s.
    assert all(kill["gone"] < 60 for kill in found["kills"])
    assert "2 kills" in capsys.readouterr().out
