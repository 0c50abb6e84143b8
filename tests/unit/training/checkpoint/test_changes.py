"""If a run resumes with allowed changes, the changes are reported. Changes that affect results are
rejected, even if tokens without hashes have changed."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.run_configs import tiny_config
from tests.saved_state import reseal
from tests.token_files import write_token_set
from training.checkpoint.checkpoints import read_checkpoint
from training.checkpoint.stored_checkpoint import ResumeError
from training.data import token_set
from training.data.hashes import file_sha256
from training.loop import ignore
from training.run import train
from training.step import StepResult


@pytest.fixture
def run(folder: str, tmp_path: Path, world):
    """A function that trains in tmp_path/run up to a step. Keywords are config keys with `__` in
    place of dots."""
    write_token_set(tmp_path / "more", tokens=4_000, vocab=120, seed=1)

    def start(step: int, on_step: Any = ignore, **keys: Any) -> None:
        common = {"train__steps": 8, "train__exit_step": step, "checkpoint__interval": 100}
        common["train__micro_batch"] = 4
        train(tiny_config(folder, "muon", **common | keys), world, on_step=on_step)

    return start


@pytest.fixture
def tokens(tmp_path: Path, run) -> Path:
    """The token file of the run, with 0.4 MB and without a manifest."""
    write_token_set(tmp_path / "tokens", tokens=200_000, vocab=120, seed=0)
    return tmp_path / "tokens.bin"


def test_a_dtype_that_changes_numbers_is_refused(run) -> None:
    run(2)
    for key in ("gradient_dtype", "exchange_dtype", "momentum_dtype"):
        with pytest.raises(ResumeError, match=rf"its optimizer: {key} was \w+ and is now bf16"):
            run(4, **{f"optimizer__distributed__{key}": "bf16"})


def test_other_changes_are_said(run, tmp_path, capsys) -> None:
    run(2)
    # The checkpoint of a run on other software, devices and ranks.
    other = {"layout": {"ranks": 3}, "device": {"device": "H100"}}
    other["versions"] = {"torch": "1.0", "numpy": "1.0"}
    reseal(read_checkpoint(tmp_path / "run").path, lambda meta: meta.update(other))
    keys = {
        "spikes__deviations": 4,
        "run__deterministic": True,
        "validation__samples": 3,
        "data__validation__more__path": tmp_path / "more",
        "train__global_batch": 4,
        "train__micro_batch": 2,
        "train__loss_chunk": 60,
        "schedule__warmup_steps": 4,
        "checkpoint__allow_change": "[train,schedule]",
    }
    run(4, **keys)
    printed, events = capsys.readouterr().out, (tmp_path / "run" / "events.jsonl").read_text()
    for text in (
        "spikes.deviations was None and is now 4.0",
        "run.deterministic was False and is now True",
        "validation.samples was 5 and is now 3",
        "validation.more was absent and is now there",
        "weight of walk in val/loss was 1.0 and is now 0.5",
        "global_batch was 8 and is now 4",
        "learning-rate factor of the next step was 1 and is now 0.75",
        "train.micro_batch was 4 and is now 2",
        "train.loss_chunk was None and is now 60",
        "ranks was 3 and is now 1",
        "device was H100 and is now cpu",
        f"torch was 1.0 and is now {torch.__version__}",
        f"numpy was 1.0 and is now {np.__version__}",
    ):
        assert f"changed since step 2: {text}" in printed and text in events
    run(6, **keys)
    assert "changed since" not in capsys.readouterr().out


def overwrite_between_samples(path: Path) -> None:
    """Overwrite the bytes between 64 evenly spaced blocks of 4 KiB."""
    tokens = np.memmap(path, np.uint16, "r+")
    starts = [(2 * len(tokens) - 4096) * block // 63 // 2 for block in range(64)]
    for first, second in zip(starts, starts[1:], strict=False):
        tokens[first + 2050 : second] = 7
    tokens.flush()


def test_a_set_that_was_overwritten_between_samples_is_refused(run, tokens) -> None:
    run(2)
    overwrite_between_samples(tokens)
    with pytest.raises(ResumeError, match=r"its data: (.|\n)*walk.content was"):
        run(4)


def test_a_large_set_that_was_written_to_is_refused(run, tokens, monkeypatch) -> None:
    monkeypatch.setattr(token_set, "WHOLE", 1 << 18)
    run(2)
    run(3)
    overwrite_between_samples(tokens)
    os.utime(tokens, (1e9, 1e9))
    with pytest.raises(ResumeError, match=r"walk.modified was \S+ and is now 2001-09-09T01:46:40"):
        run(4)
    run(4, checkpoint__allow_change="[data]")
    run(5)


def test_a_large_set_of_another_hash_is_refused(run, tokens, monkeypatch) -> None:
    """The manifest contains a hash of all tokens."""
    monkeypatch.setattr(token_set, "WHOLE", 1 << 18)
    stated = property(lambda each: file_sha256(f"{each.prefix}.bin"))
    monkeypatch.setattr(token_set.TokenSet, "stated_sha256", stated)
    run(2)
    overwrite_between_samples(tokens)
    with pytest.raises(ResumeError, match=r"its data: walk.sha256 was \w+"):
        run(4)


def test_a_set_that_is_written_to_while_it_is_read_is_named_once(run, tokens, capsys) -> None:
    def write(step: int, result: StepResult) -> None:
        overwrite_between_samples(tokens)

    run(4, on_step=write, log__interval=1)
    said = capsys.readouterr().out
    assert said.count(f"warning: {tokens} was modified after the run opened it") == 1
