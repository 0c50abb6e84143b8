"""Runs of a study are forks of a worker: each is pretrain.py by itself, and says how it ended."""

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from pretrain import main
from scripts.studies.worker import Worker
from training.lifecycle.run_folder import DONE


@pytest.fixture(scope="module")
def worker():
    """One worker for all tests, as a study has it."""
    with closing(Worker({**os.environ, "OMP_NUM_THREADS": "1"})) as worker:
        yield worker


def losses(folder: Path) -> list[float]:
    """Training losses of a run folder."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line["train/loss"] for line in map(json.loads, lines) if "train/loss" in line]


def test_a_fork_trains_as_the_command_does(worker, minimal, tmp_path):
    arguments = ["--config", str(minimal), "checkpoint.interval=0", "log.interval=1"]
    assert main([*arguments, f"run.dir={tmp_path / 'own'}"]) == 0
    for name in ("first", "second"):  # what one run leaves behind does not reach the next
        code, seconds = worker.run(
            [*arguments, f"run.dir={tmp_path / name}"], tmp_path / f"{name}.txt"
        )
        assert code == 0 and seconds > 0
        assert (tmp_path / name / DONE).exists()
        assert "done: " in (tmp_path / f"{name}.txt").read_text()
        assert losses(tmp_path / name) == losses(tmp_path / "own") != []


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["train.steps=0"], 2, "train.steps"),
        (["--no-such-option"], 2, "unrecognized arguments: --no-such-option"),
    ],
)
def test_a_wrong_run_says_so_in_its_log(worker, minimal, tmp_path, arguments, code, text):
    log = tmp_path / "log.txt"
    found, _ = worker.run(
        ["--config", str(minimal), *arguments, f"run.dir={tmp_path / 'run'}"], log
    )
    assert found == code and text in log.read_text()
