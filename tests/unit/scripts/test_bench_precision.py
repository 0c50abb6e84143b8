"""scripts/bench/precision.py: pairs of runs, once each, and their table."""

import json

import pytest

from scripts.bench.precision import Run, main, table
from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from training.config import to_yaml


@pytest.fixture
def recipe(tmp_path) -> str:
    """A recipe of three steps."""
    write_token_set(tmp_path / "tokens", tokens=8_000, vocab=120, seed=0)
    config = tiny_config(str(tmp_path), "muon", train__steps=3, validation__samples=4)
    (tmp_path / "small.yaml").write_text(to_yaml(config))
    return str(tmp_path / "small.yaml")


def test_a_run_that_is_recorded_is_not_repeated(recipe, tmp_path, capsys) -> None:
    output = tmp_path / "precision.json"
    arguments = [f"{recipe} model.layers=1", "--output", str(output)]
    assert main(arguments) == 0
    runs = [Run(**run) for run in json.loads(output.read_text())["runs"]]
    assert [(run.precision, run.seed) for run in runs] == [("bf16", 1), ("fp32", 1)]
    assert 0 < abs(runs[0].loss - runs[1].loss) < 0.1
    assert not any(run.refused or run.skipped for run in runs)
    before = output.read_text()
    capsys.readouterr()
    assert main(arguments) == 0
    assert output.read_text() == before
    assert "| 1 |" in capsys.readouterr().out


def test_two_at_a_time(recipe, tmp_path, capsys) -> None:
    output = tmp_path / "precision.json"
    assert main([recipe, "--output", str(output), "--jobs", "2"]) == 0
    runs = [Run(**run) for run in json.loads(output.read_text())["runs"]]
    assert [(run.precision, run.seed) for run in runs] == [("bf16", 1), ("fp32", 1)]
    with pytest.raises(SystemExit):
        main([recipe, "--output", str(output), "--jobs", "0"])
    assert "--jobs must be at least 1, got 0" in capsys.readouterr().err


def test_another_file_is_left_alone(recipe, tmp_path, capsys) -> None:
    output = tmp_path / "other.json"
    output.write_text('{"losses": []}')
    assert main([recipe, "--output", str(output)]) == 2
    assert "--output must name a file that this command wrote" in capsys.readouterr().err
    assert output.read_text() == '{"losses": []}'


def test_the_table_has_the_largest_difference_of_seeds_with_both_precisions() -> None:
    losses = {(1, "bf16"): 4.0, (1, "fp32"): 4.01, (2, "bf16"): 4.2, (2, "fp32"): 4.17}
    runs = [Run("configs/a.yaml", s, p, loss, True, 0, 0) for (s, p), loss in losses.items()]
    runs.append(Run("configs/a.yaml", 3, "bf16", 9.0, False, 1, 0))
    (line,) = table(runs).splitlines()[2:]
    assert line == "| a | 2 | 4.100 | 4.090 | +0.030 | 4 of 4 | 0 |"
