"""The number of tokens that a run reports equals the number of tokens in its batches."""

import json
import re
from dataclasses import replace
from pathlib import Path

from scripts.huggingface.card import card
from scripts.plots.run_data import read_run
from scripts.plots.run_page import key_figures
from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from training import step as training_step
from training.checkpoint.checkpoints import read_checkpoint, step_folder
from training.machine.device import versions
from training.report.log_lines import read_lines, read_metrics
from training.run import train

STARTS = [
    {"train__exit_step": 3},
    {"train__exit_step": 5, "train__global_batch": 4},
    {"train__exit_step": 7, "train__global_batch": 4, "train__sequence_length": 16},
    {"train__sequence_length": 24},
]


def test_over_three_resumes_with_another_batch_and_length(
    folder, tmp_path, world, monkeypatch, capsys
):
    read = 0
    batches = training_step.training_batches

    def counted(*arguments):
        nonlocal read
        for batch in batches(*arguments):
            read += batch.shape[0] * (batch.shape[1] - 1)
            yield batch

    monkeypatch.setattr(training_step, "training_batches", counted)
    common = {"train__steps": 10, "checkpoint__interval": 100, "log__interval": 1}
    common |= {"train__micro_batch": 4, "monitors__interval": 1, "monitors__groups": "[weights]"}
    common |= {"checkpoint__allow_change": "[data,train]", "schedule__warmup_steps": 0}
    common["checkpoint__keep_last"] = 4
    seen = []
    for keys in STARTS:
        train(tiny_config(folder, "muon", **common, **keys), world)
        seen.append(read)
    printed = re.findall(
        "tokens: (.*) in total, (.*) of them before step (.*)", capsys.readouterr().out
    )
    assert printed == [("1,664", "768", "4"), ("1,344", "1,024", "6"), ("1,728", "1,152", "8")]
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


def test_every_row_of_a_card_is_that_of_the_run(folder: str, world) -> None:
    keys: dict[str, object] = {"data__train__walk": "null", "pc__level": 4}
    for name, weight in {"a": 3, "b": 1}.items():
        keys[f"data__train__{name}__path"] = f"{folder}/tokens"
        keys[f"data__train__{name}__weight"] = weight
    keys["data__phases"] = "[{after_steps: 1, weights: {a: 1, b: 4}}]"
    keys |= {"train__batch_ramp": "[{batch: 4, until_steps: 1}]", "train__micro_batch": 4}
    keys |= {"train__exit_step": 2, "checkpoint__interval": 2, "optimizer__roles__o__lr": 0.004}
    config = tiny_config(folder, "muon", **keys)
    train(config, world)
    info = read_checkpoint(config.run.dir)
    origin = {"path": "runs/before", "step": 4000, "sha256": ""}
    mean = {"steps": [1000, 2000], "weights": [0.25, 0.75]}
    meta = {**info.meta, "initialized_from": origin, "averaged": mean}
    text = card(replace(info, meta=meta), name="n", architecture="a", dtype="bfloat16")
    rows = dict(re.findall(r"(?m)^\| (.+?) \| (.+?) \|$", text))
    loss = read_metrics(config.run.dir)[-1]["val/walk/loss"]
    layer = 64 * (64 + 32 + 32 + 64 + 3 * 96 + 2)
    assert rows == {
        "parameters": f"{2 * layer + 64 + 2 * 120 * 64:,}",
        "weights": "bfloat16",
        "mean of": "step 1,000 times 0.25, step 2,000 times 0.75",
        "tokens": f"{(4 + 8) * 32}",
        "batch": "4 until step 1, then 8 sequences of 32 tokens",
        "precision": "fp32",
        "matrix weights": "muon, lr 0.02, weight decay 0.1",
        "embedding weights": "adamw, lr 0.003, weight decay 0.1",
        "head weights": "adamw, lr 0.003, weight decay 0.1",
        "scalar weights": "adamw, lr 0.003, weight decay 0",
        "o weights": "lr 0.004",
        "initialized from": "step 4,000 of runs/before",
        "schedule": "kind cosine, unit steps, warmup_steps 2, min_ratio 0.1, cooldown_fraction 0.2",
        "PC layers": "merged into the weights, level 4",
        "data": "a 75.0%, b 25.0%",
        "data after step 1": "a 20.0%, b 80.0%",
        "seed": "7",
        "software": ", ".join(f"{k} {v}" for k, v in versions().items() if v is not None),
        "validation": "nats per token",
        "walk": f"{loss:.4f}",
    }
    assert "run `test`, step 2 of 20." in text


def test_of_a_set_that_is_smaller_than_a_batch(tmp_path: Path, world, capsys) -> None:
    write_token_set(tmp_path / "tokens", tokens=100, vocab=120, seed=0, documents=2)
    train(tiny_config(str(tmp_path), "muon", train__steps=3), world)
    use = "100.0% of the samples, 24 samples, 768 tokens, 8.00 epochs of 3 windows"
    assert f"data walk: {use}" in capsys.readouterr().out
