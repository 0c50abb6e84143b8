"""A run under torchrun whose ranks are killed is started again, and ends as if nothing had been."""

import json

import pytest

from scripts.bench.restart import killed_run, main, parse


@pytest.mark.timeout(1200)
def test_killed_ranks_are_started_again_and_change_nothing(tmp_path, capsys):
    output = tmp_path / "restart.json"
    assert main(["--kills", "2", "--output", str(output)]) == 0
    found = json.loads(output.read_text())["disk"]
    assert found["different"] == [] and len(found["kills"]) == 2 and found["from_memory"] == 0
    assert found["steps"] > found["kills"][1]["step"] >= found["kills"][0]["step"] > 0
    # They do not wait for the time-out of collectives, of 600 s.
    assert all(kill["gone"] < 60 for kill in found["kills"])
    assert "disk: 2 kills" in capsys.readouterr().out


@pytest.mark.timeout(1200)
def test_killed_ranks_go_on_from_memory_before_there_is_a_checkpoint_on_disk():
    # With this seed both ranks are killed, the last one long before the first checkpoint.
    found = killed_run(parse(["--kills", "2", "--interval", "200", "--seed", "165"]), memory=1)
    assert {kill["rank"] for kill in found["kills"]} == {0, 1}
    assert max(kill["step"] for kill in found["kills"]) < 150
    assert found["different"] == [] and found["from_memory"] == len(found["kills"]) == 2
    assert all(kill["repeated"] <= 1 for kill in found["kills"])
