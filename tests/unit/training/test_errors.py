"""What is said of an error: with its file, by the rank that has it, and to torchrun."""

import json
import os
from pathlib import Path

import pytest

from parallel.checkpoint.state_writer import WriterError, first_rank
from parallel.errors import described
from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from training import errors
from training.errors import fail
from training.report.log_lines import read_lines
from training.run import train


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "a.bin"), "No space left on device: a.bin"),
        (OSError(28, "No space left on device"), "No space left on device: b.bin"),
        (OSError("the file is short"), "the file is short: b.bin"),
        (OSError(), "OSError: b.bin"),
    ],
)
def test_an_error_of_the_system_never_says_none(error: OSError, said: str) -> None:
    assert described(error, "b.bin") == said
    assert "None" not in described(error)


@pytest.mark.usefixtures("world")
def test_the_first_rank_passes_on_an_error_without_a_text() -> None:
    def call() -> None:
        raise OSError

    with pytest.raises(WriterError, match="^OSError$"):
        first_rank(call)


def test_a_rank_that_outlives_the_first_one_names_itself(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(errors, "PATIENCE", 0.0)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "3")
    assert fail("one\ntwo", code=2) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ", 2)[2] for line in lines] == ["one", "two"]
    assert all(line.startswith("error: rank 3 (host ") for line in lines)
    told = json.loads((tmp_path / "error.json").read_text())
    assert told["message"].splitlines()[0] == lines[0].removeprefix("error: ")
    assert int(told["timestamp"]) > 1e9
    monkeypatch.setenv("RANK", "0")
    assert fail("one", code=1) == 1
    assert capsys.readouterr().err == "error: one\n"


def test_a_failure_is_an_event(tmp_path: Path, world) -> None:
    write_token_set(tmp_path / "tokens", tokens=4_000, vocab=120, seed=0)
    config = tiny_config(str(tmp_path), "adamw", log__interval=1)

    def fail_at(step: int, result: object) -> None:
        if step == 2:
            raise RuntimeError("the second step broke")

    with pytest.raises(RuntimeError):
        train(config, world, on_step=fail_at)
    last = read_lines(tmp_path / "run" / "events.jsonl").lines[-1]
    assert (last["kind"], last["step"], last["text"]) == ("failed", 2, "the second step broke")
    assert "RANK" in os.environ
