"""Tokens that change under a run without hashes of them are noticed when it continues."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from training.checkpoint.files import ResumeError
from training.data import token_set
from training.loop import StepResult
from training.run import train

TOKENS = 1_000_000


@pytest.fixture
def run(tmp_path: Path, world):
    """Trains in tmp_path/run to a step, on a set of 2 MB without a manifest."""
    write_token_set(tmp_path / "tokens", tokens=TOKENS, vocab=120, seed=0)

    def start(step: int, on_step: Any = None, **keys: Any) -> None:
        common = {"train__steps": 8, "train__exit_step": step, "checkpoint__interval": 100}
        train(tiny_config(str(tmp_path), "muon", **common, **keys), world, on_step=on_step)

    return start


def overwrite_between_samples(path: Path) -> None:
    """Overwrite what lies between 64 evenly spaced blocks of 4 KiB."""
    tokens = np.memmap(path, np.uint16, "r+")
    starts = [(2 * len(tokens) - 4096) * block // 63 // 2 for block in range(64)]
    for first, second in zip(starts, starts[1:], strict=False):
        tokens[first + 2050 : second] = 7
    tokens.flush()


def test_a_set_that_was_overwritten_between_samples_is_refused(run, tmp_path) -> None:
    run(2)
    overwrite_between_samples(tmp_path / "tokens.bin")
    with pytest.raises(ResumeError, match=r"its data: (.|\n)*walk.content was"):
        run(4)


def test_a_large_set_that_was_written_to_is_refused(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(token_set, "WHOLE", 1 << 20)
    run(2)
    run(3)
    path = tmp_path / "tokens.bin"
    overwrite_between_samples(path)
    os.utime(path, (1e9, 1e9))
    with pytest.raises(ResumeError, match=r"walk.modified was \S+, is 2001-09-09T01:46:40"):
        run(4)
    run(4, checkpoint__allow_change="[data]")
    run(5)


def test_a_set_that_is_written_to_while_it_is_read_is_named_once(run, tmp_path, capsys) -> None:
    def write(step: int, result: StepResult) -> None:
        overwrite_between_samples(tmp_path / "tokens.bin")

    run(4, on_step=write, log__interval=1)
    said = capsys.readouterr().out
    assert said.count(f"warning: {tmp_path}/tokens.bin was written to after the run had") == 1
