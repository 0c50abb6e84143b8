"""A command that is rejected for any reason changes nothing in the run folder."""

import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import pretrain
from tests.run_configs import tiny_config
from tests.run_results import hashes
from training.report.log_lines import read_lines

KEYS = ["checkpoint.interval=2", "checkpoint.keep_last=2", "log.interval=1", "train.steps=4"]
KEYS += ["train.global_batch=2", "validation.samples=2"]


@pytest.fixture(scope="module")
def finished(shared_folder: Path) -> Path:
    """A folder with a token set, a config, and a run with checkpoints at steps 2 and 4."""
    tiny_config(str(shared_folder), "adamw")
    assert start(shared_folder, shared_folder / "run") == 0
    return shared_folder


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run in `finished`."""
    return Path(shutil.copytree(finished / "run", tmp_path / "run"))


def start(folder: Path, run_dir: Path, *arguments: str) -> int:
    """Start pretrain.py in this process and return its exit code."""
    with patch.dict(os.environ):
        config = ["--config", str(folder / "config.yaml"), f"run.dir={run_dir}"]
        return pretrain.main([*config, *KEYS, *arguments])


REFUSED: dict[str, list[str]] = {
    "a misspelled path without a resume": ["--resume", "none", "checkpoint.initialize_from=/typo"],
    "another model without a resume": ["--resume", "none", "checkpoint.initialize_from={run}",
                                       "seed=9", "model.ffn=64"],
    "a model of another size": ["--resume", "2", "model.ffn=64", "checkpoint.allow_change=[model]"],
    "another model": ["--resume", "2", "model.ffn=64"],
    "a step that is not there": ["--resume", "3"],
    "weights to begin from, of a run that has begun": ["checkpoint.initialize_from={run}"],
    "another rate": ["optimizer.matrix.lr=0.7"],
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_command_changes_nothing(case, finished, run_dir, capsys):
    (run_dir / "STOP").touch()
    (run_dir / "checkpoints" / ".writing-6-abcd").mkdir()
    before = hashes(run_dir)
    arguments = [word.format(run=run_dir) for word in REFUSED[case]]
    assert start(finished, run_dir, *arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert hashes(run_dir) == before
    assert (run_dir / "checkpoints" / ".writing-6-abcd").is_dir()
    assert sorted(path.name for path in run_dir.glob("checkpoints*")) == ["checkpoints"]


@pytest.mark.parametrize("change", ["optimizer.matrix.rule=muon", "pc.level=2"])
def test_a_state_that_does_not_fit_is_one_whole_line_with_what_to_do(
    change, finished, run_dir, refusal
):
    allowed = "checkpoint.allow_change=[model,optimizer]"
    said = refusal(start(finished, run_dir, "--resume", "2", change, allowed))
    step = run_dir / "checkpoints" / "step_00000002"
    assert said.startswith(f"error: {step} cannot be loaded: ") and said.count("\n") == 1
    begin = f", and checkpoint.initialize_from={step} to start from its weights"
    assert said.endswith(f"; set another run.dir{'' if change.startswith('pc') else begin}\n")


def test_weights_that_do_not_fit_are_no_change_to_allow(finished, run_dir, refusal):
    allowed = "checkpoint.allow_change=[model,optimizer]"
    said = refusal(start(finished, run_dir, "model.layers=1", allowed))
    assert "differs in its model: layers was 2 and is now 1" in said
    assert "the weights do not fit this model: set another run.dir; to start over" in said


def test_only_checkpoints_with_other_names_are_no_reason_to_start_over(finished, run_dir, refusal):
    place = run_dir / "checkpoints"
    shutil.rmtree(place / "step_00000002")
    (place / "step_00000004").rename(place / "step_00000099")
    before = hashes(run_dir)
    said = refusal(start(finished, run_dir))
    wrong = "step_00000099: the folder's name must contain 4, the step in meta.json"
    assert wrong in said and "--resume none" in said
    assert hashes(run_dir) == before


LINES: dict[str, bytes] = {
    "not JSON": b"{'step': 1}\n",
    "no mapping": b"[1, 2]\n",
    "no step": b'{"train/loss": 1.0}\n',
    "a step that is no number": b'{"step": "one"}\n',
    "not UTF-8": b'{"step": 1, "x": "\xff\xfe"}\n',
    "nested deeply": b"[" * 100_000 + b"\n",
    "zeros": bytes(100) + b"\n",
}


def prepend(path: Path, line: bytes) -> None:
    """Insert a line at the start of a file."""
    path.write_bytes(line + (path.read_bytes() if path.exists() else b""))


def test_damaged_logs_do_not_stop_a_run(finished, run_dir, capsys):
    """Unreadable lines are dropped and counted. All other lines are kept."""
    logs = ("metrics.jsonl", "monitors.jsonl", "events.jsonl")
    for line in LINES.values():
        for name in logs:
            prepend(run_dir / name, line)
    (run_dir / "events.jsonl").write_bytes((run_dir / "events.jsonl").read_bytes() + b'{"half')
    (run_dir / "checkpoints" / "latest").write_bytes(b"\xff\xfe")
    (run_dir / "lock").write_bytes(b"\xff\xfe")
    (run_dir / "config.yaml").write_bytes(b"\xff\xfe")
    more: Any = ["train.steps=6", "checkpoint.allow_change=[schedule]"]
    assert start(finished, run_dir, *more) == 0
    printed = capsys.readouterr().out
    assert f"dropped {len(LINES)} damaged lines from metrics.jsonl" in printed
    steps = [line["step"] for line in read_lines(run_dir / "metrics.jsonl").lines]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert (run_dir / "checkpoints" / "latest").read_text() == "step_00000006\n"
    kinds = [line["kind"] for line in read_lines(run_dir / "events.jsonl").lines]
    assert kinds[-1] == "done" and "continued" in kinds
