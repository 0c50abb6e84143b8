"""Error reports name the file, come from the failing rank, and reach torchrun."""

import json
import socket
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from parallel.comm.collectives import CollectiveError
from tests.run_configs import tiny_config
from training import command_line
from training.command_line import fail, print_error
from training.errors import printable
from training.nonfinite import NonFiniteError
from training.report.console import sample_lines
from training.report.log_lines import read_lines
from training.run import naming_absent, reports, train


def test_a_rank_that_outlives_the_first_one_names_itself(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(command_line, "PATIENCE", 0.0)
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
    assert fail("one", code=1) == 1 and capsys.readouterr().err == "error: one\n"


def test_a_text_from_elsewhere_commands_no_terminal(capsys) -> None:
    text = "a\x1b]0;title\x07b\ud83dc\x9bd\u202ee\x00\r\nf\tä😀"
    shown = printable(text)
    assert shown == "a\ufffd]0;title\ufffdb\ufffdc\ufffdd\ufffde\ufffd\nf\tä😀"
    shown.encode()
    print_error(text)
    assert capsys.readouterr().err == "".join(f"error: {line}\n" for line in shown.split("\n"))
    lines = list(sample_lines({"sample/a/text": text, "sample/a/prompt": text}))
    assert lines == [printable(line) for line in lines]


def test_a_failure_is_an_event(folder: str, tmp_path, world) -> None:
    config = tiny_config(folder, "adamw", log__interval=1)

    def fail_at(step: int, result: object) -> None:
        if step == 2:
            raise RuntimeError("the second step broke")

    with pytest.raises(RuntimeError):
        train(config, world, on_step=fail_at)
    last = read_lines(tmp_path / "run" / "events.jsonl").lines[-1]
    assert (last["kind"], last["step"], last["text"]) == ("failed", 2, "the second step broke")
    assert (last["error"], last["rank"], last["host"]) == ("RuntimeError", 0, socket.gethostname())


def test_one_rank_writes_the_event_of_what_several_fail_with() -> None:
    """If only one rank has an error, this rank writes the event."""
    left = CollectiveError("all-reduce failed", {0: "n1", 2: "n2"})
    assert [reports(left, rank) for rank in (1, 3)] == [True, False]
    unknown = CollectiveError("all-reduce failed")
    assert [reports(unknown, rank) for rank in range(2)] == [True, False]
    common = NonFiniteError("no loss", 1, (0, 4))
    assert [reports(common, rank) for rank in range(2)] == [True, False]
    assert all(reports(MemoryError(), rank) for rank in range(2))


def test_the_first_rank_that_answers_writes_which_ranks_do_not(monkeypatch) -> None:
    """In this test, rank 0 of 3 does not answer."""
    monkeypatch.setattr("parallel.comm.collectives.PATIENCE", 0.5)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    store = dist.HashStore()
    for rank in range(3):
        store.set(f"host/{rank}", f"n{rank}")
    store.set("failed/2", "")
    text = r"^all-reduce failed; no answer from rank 0 \(host n0\)$"
    names = naming_absent(SimpleNamespace(store=store, rank=1))
    with pytest.raises(CollectiveError, match=text) as caught, names:
        raise CollectiveError("all-reduce failed")
    assert [reports(caught.value, rank) for rank in (1, 2)] == [True, False]
