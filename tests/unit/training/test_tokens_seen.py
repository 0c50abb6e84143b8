"""The reported tokens of a run equal the tokens in its batches."""

import json
from pathlib import Path

import pytest

from scripts.huggingface.card import card
from scripts.plots.run_data import read_run
from scripts.plots.run_page import key_figures
from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from training import build
from training.checkpoint.checkpoints import read_checkpoint, step_folder
from training.report.log_lines import read_lines
from training.report.metrics import read_metrics
from training.run import train

STARTS = [
    {"train__exit_step": 3},
    {"train__exit_step": 5, "train__global_batch": 4},
    {"train__exit_step": 7, "train__global_batch": 4, "train__sequence_length": 16},
    {"train__sequence_length": 24},
]


def test_over_three_resumes_with_another_batch_and_length(
    folder: str, tmp_path: Path, world, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0
    batches = build.training_batches

    def counted(*arguments):
        nonlocal read
        for batch in batches(*arguments):
            read += batch.shape[0] * (batch.shape[1] - 1)
            yield batch

    monkeypatch.setattr(build, "training_batches", counted)
    common = {"train__steps": 10, "checkpoint__interval": 100, "log__interval": 1}
    common |= {"train__micro_batch": 4, "monitors__interval": 1, "monitors__groups": "[weights]"}
    common |= {"checkpoint__allow_change": "[data,train]", "schedule__warmup_steps": 0}
    common["checkpoint__keep_last"] = 4
    seen = []
    for keys in STARTS:
        train(tiny_config(folder, "muon", **common, **keys), world)
        seen.append(read)
    assert read == 3 * 8 * 32 + 2 * 4 * 32 + 2 * 4 * 16 + 3 * 8 * 24
    folder = tmp_path / "run"
    logged = {line["step"]: line["progress/tokens"] for line in read_metrics(folder)}
    assert [logged[step] for step in (3, 5, 7, 10)] == seen
    monitored = {
        line["step"]: line["tokens"] for line in read_lines(folder / "monitors.jsonl").lines
    }
    assert monitored == logged
    losses = {line["step"]: line.get("val/walk/loss", 0.0) for line in read_metrics(folder)}
    for step, tokens in zip((3, 5, 7, 10), seen, strict=True):
        info = read_checkpoint(step_folder(folder, step))
        text = card(info, name="n", architecture="a", dtype="float32")
        assert f"| tokens | {tokens:,} |" in text and f"| walk | {losses[step]:.4f} |" in text
    stated = json.loads((folder / "data.json").read_text())
    assert stated["tokens"] == read == stated["sets"][0]["tokens"]
    run = read_run(folder)
    assert [run.tokens({"step": step}) for step in (3, 5, 7, 10)] == seen
    assert dict(key_figures(run))["tokens"] == "1.73k"


def test_of_a_set_that_is_smaller_than_a_batch(tmp_path: Path, world, capsys) -> None:
    write_token_set(tmp_path / "tokens", tokens=100, vocab=120, seed=0, documents=2)
    train(tiny_config(str(tmp_path), "muon", train__steps=3), world)
    use = "100.0% of the samples, 24 samples, 768 tokens, 8.00 epochs of 3 windows"
    assert f"data walk: {use}" in capsys.readouterr().out
