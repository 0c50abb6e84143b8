"""The runs of a study on several ranks each."""

import json
from pathlib import Path

import pytest
import yaml

from scripts.study import main
from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from training.config import to_yaml
from training.report.metrics import read_metrics

pytestmark = pytest.mark.slow

SPEED, EACH = "perf/tokens_per_sec", "perf/tokens_per_sec_per_gpu"


@pytest.fixture
def study_file(tmp_path) -> Path:
    """A study of two runs of three steps."""
    write_token_set(tmp_path / "tokens", tokens=8_000, vocab=120, seed=0)
    config = tiny_config(str(tmp_path), "muon", train__steps=3, validation__samples=4)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    study = {
        "title": "t",
        "seeds": [1, 2],
        "overrides": ["checkpoint.interval=0"],
        "variants": {"muon": {"config": str(tmp_path / "config.yaml")}},
    }
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path


def losses(folder: Path) -> list[float]:
    return json.loads((folder / "results.json").read_text())["rows"][0]["losses"]


def test_two_ranks_give_the_loss_of_one(study_file, tmp_path) -> None:
    for ranks in ("1", "2"):
        assert main([str(study_file), str(tmp_path / ranks), "--nproc", ranks]) == 0
    rates = [line for line in read_metrics(tmp_path / "2" / "muon-1") if SPEED in line]
    assert rates and all(line[SPEED] == pytest.approx(2 * line[EACH]) for line in rates)
    # float32 sums in another order.
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)


def test_what_a_rank_says_is_told(study_file, tmp_path, capsys) -> None:
    """torchrun prints a report of its own after it."""
    options = ["--nproc", "2", "parallel.tensor=3"]
    assert main([str(study_file), str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert "muon-1, ended with 1 and without a loss: error: " in error and "tensor" in error
