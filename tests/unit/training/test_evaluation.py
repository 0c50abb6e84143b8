"""Scores on multiple-choice tasks during training: comparisons with references, unchanged training,
and errors."""

import json
import math
import os
import re
import shutil
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.layout import Layout
from scripts.huggingface.export import export
from scripts.plot import main as plot
from tests.run_configs import MIXTURE, read_config, tiny_config
from tests.run_results import json_lines, metrics_of, same_state, state_of
from tests.task_files import task_keys, write_tasks
from tests.token_files import prepare_text
from training.build import build_trainer, restore
from training.checkpoint.changes import announced, differences
from training.checkpoint.checkpoints import read_checkpoint
from training.checkpoint.identity import identity
from training.checkpoint.stored_checkpoint import ResumeError
from training.config import load_config
from training.data.build_data import build_data, build_tasks
from training.data.tasks import Task, accuracies, read_examples, read_task
from training.data.token_bytes import open_tokenizer
from training.errors import ConfigError, DataError
from training.evaluation import (
    SHORTEST,
    Interrupted,
    lengths,
    log_likelihoods,
    tokens_of_a_pass,
)
from training.loop import Hooks, Loop
from training.planning.plan_commands import dry_run
from training.run import agreed_facts, train

TEXT = "A matrix has rows and columns, of which the number {i} is one; é is a letter.\n\n"
WINDOW = 32


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder with a trained tokenizer and the sets `tokens`."""
    return prepare_text(tmp_path_factory.mktemp("data"), TEXT, 800)


@pytest.fixture
def keys(tokens: Path, tmp_path: Path) -> dict[str, Any]:
    """Overrides for a run on the prepared tokens that scores two tasks at steps 2, 4 and 6."""
    sets = {f"data__{kind}__walk__path": f"{tokens}/tokens.train"
            for kind in ("train", "validation")}  # fmt: skip
    return task_keys(
        write_tasks(tmp_path),
        **sets,
        model__vocab_size=300,
        train__steps=6,
        log__interval=3,
        train__micro_batch=8,
        checkpoint__interval=3,
        tasks__interval=2,
    )


def independent(folder: Path, file: str) -> list[list[float]]:
    """Return the log-likelihood of each choice in each example, computed by transformers one at a
    time. As in lm-eval, spaces at the end of a context belong to the choice, and requests longer
    than a window are truncated from the left."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    found = []
    for row in json_lines(Path(file)):
        context = row["context"].rstrip()
        rest = row["context"][len(context) :]
        found.append([])
        for choice in row["choices"]:
            if row["context"]:
                whole = ids(f"{context}{rest} {choice}")
                count = len(whole) - len(ids(context))
            else:
                whole = [model.config.eos_token_id, *ids(f" {choice}")]
                count = len(whole) - 1
            inputs = torch.tensor([whole[-WINDOW - 1 : -1]])
            with torch.no_grad():
                chances = model(inputs).logits[0].double().log_softmax(-1)
            right = chances[-count:].gather(1, torch.tensor(whole[-count:])[:, None])
            found[-1].append(right.sum().item())
    return found


def test_scores_are_those_of_the_export(keys, world, tmp_path, capsys):
    """Compare with the log-likelihoods from transformers and the resulting accuracies."""
    config = tiny_config(str(tmp_path), "adamw", **keys)
    train(config, world)
    printed = capsys.readouterr().out
    lines = json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "task/acc" in line] == [2, 4, 6]
    out = tmp_path / "out"
    export(tmp_path / "run", out)
    trainer = build_trainer(config, world, *build_data(config))
    restore(trainer, read_checkpoint(tmp_path / "run"))
    for task in build_tasks(config):
        file = config.tasks.files[task.name]
        expected = independent(out, file)
        flat = [value for example in expected for value in example]
        ours = log_likelihoods(trainer.model, world, task.requests, vocab_size=300, most_tokens=64)
        assert ours == pytest.approx(flat, rel=1e-5, abs=1e-4)
        right = {"acc": 0, "acc_norm": 0}
        for row, values in zip(json_lines(Path(file)), expected, strict=True):
            by_character = [v / len(c) for v, c in zip(values, row["choices"], strict=True)]
            right["acc"] += values.index(max(values)) == row["answer"]
            right["acc_norm"] += by_character.index(max(by_character)) == row["answer"]
        for key, count in right.items():
            found = lines[-1][f"task/{task.name}/{key}"]
            assert found == pytest.approx(count / len(expected), abs=1e-6)
        assert f"task {task.name}: 12 examples, {len(flat)} choices" in printed
    assert len({round(value, 3) for value in ours}) > 10
    mean = (lines[-1]["task/words/acc"] + lines[-1]["task/digits/acc"]) / 2
    assert lines[-1]["task/acc"] == pytest.approx(mean)
    assert "4 examples exceed the sequence length and are truncated from the left" in printed
    assert f"step 6 tasks, acc (acc_norm): words {lines[-1]['task/words/acc']:.4f}" in printed
    assert plot([str(tmp_path / "run"), "--html"]) == 0
    assert "Downstream tasks" in (tmp_path / "run" / "report.html").read_text()


def test_training_is_the_same_bit_for_bit(keys, world, tmp_path):
    """The model is a mixture of experts, whose routers count tokens."""
    tiny_config(str(tmp_path), "adamw")
    keys, states = keys | MIXTURE, []
    for name in ("with", "without"):
        own = {key: value for key, value in keys.items() if name == "with" or "tasks" not in key}
        train(read_config(str(tmp_path), **own, run__dir=tmp_path / name), world)
        states.append(state_of(tmp_path / name, 6))
    assert same_state(*states) == []
    ours, theirs = (
        [{k: v for k, v in line.items() if not k.startswith("task/")} for line in metrics_of(run)
         if "train/loss" in line]
        for run in (tmp_path / "with", tmp_path / "without")
    )  # fmt: skip
    assert ours == theirs


@pytest.mark.slow
def test_a_stop_while_scoring_is_made_up_for(keys, world, tmp_path):
    """The report of the step is written when the run resumes."""
    tiny_config(str(tmp_path), "adamw")
    stop = tmp_path / "run" / "STOP"
    config = read_config(str(tmp_path), **keys)
    train(config, world, on_step=lambda step, _: stop.touch() if step == 2 else None)
    stopped = metrics_of(tmp_path / "run")
    train(config, world)
    train(read_config(str(tmp_path), **keys, run__dir=tmp_path / "whole"), world)
    assert len(stopped) < len(metrics_of(tmp_path / "run"))
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")


def test_changed_tasks_are_compared_and_announced(keys, world, tmp_path):
    """The file of a task is part of the run's identity. The list of tasks and the number of
    examples may change, which the run reports."""
    keys |= {"tasks__files__other": keys["tasks__files__digits"]}
    before = tiny_config(str(tmp_path), "adamw", **keys)
    saved = agreed_facts(before, *build_data(before), build_tasks(before))
    write_tasks(tmp_path, examples=10)
    del keys["tasks__files__other"]
    config = read_config(str(tmp_path), **keys, tasks__examples=5)
    facts = agreed_facts(config, *build_data(config), build_tasks(config))
    found = differences(identity(before, saved), identity(config, facts), ())
    changed = [f"tasks.{name}.sha256" for name in ("words", "digits")]
    assert {kind: [each.key for each in of] for kind, of in found.items()} == {"data": changed}
    meta = {"identity": saved, "progress": {"step": 3, "tokens": 0}}
    start = SimpleNamespace(config=before, meta=meta)
    kinds = {"layout": {}, "device": {}, "versions": {}}
    said = ["tasks.examples was None and is now 5", "tasks.other was there and is now absent"]
    assert announced(start, config, saved, kinds) == said


@pytest.mark.slow
def test_another_file_is_another_task(keys, world, tmp_path, capsys):
    """As with changed validation data, a run does not resume with a changed task. Tasks may be
    added or removed."""
    first = {k: v for k, v in keys.items() if not k.endswith("digits")}
    train(tiny_config(str(tmp_path), "adamw", **first, train__exit_step=3), world)
    capsys.readouterr()
    train(read_config(str(tmp_path), **keys, train__exit_step=4, tasks__examples=5), world)
    printed = capsys.readouterr().out
    for change in (
        "tasks.examples was None and is now 5",
        "tasks.digits was absent and is now there",
    ):
        assert f"changed since step 3: {change}" in printed
    words = Path(keys["tasks__files__words"])
    words.write_text(words.read_text().splitlines()[0] + "\n")
    with pytest.raises(ResumeError, match=r"differs in its data: tasks\.words\.sha256 was"):
        train(read_config(str(tmp_path), **keys), world)


def test_made_tokens_score_made_tasks(world, folder, capsys):
    """No files are needed, because rehearsals and plans may not have the files."""
    files = task_keys({"far": "/nowhere/far.jsonl"}, data__mock="true", train__exit_step=1)
    train(tiny_config(folder, "adamw", **files), world)
    assert "of random tokens, because data.mock is true" in capsys.readouterr().out
    assert 0 <= json_lines(Path(folder) / "run" / "metrics.jsonl")[-1]["task/far/acc"] <= 1


GOOD = {"context": "one", "choices": ["a", "b"], "answer": 1}
WRONG: dict[str, tuple[Any, str]] = {
    "not JSON": ('{"context": ', "line 2: invalid JSON"),
    "a key twice": ('{"answer": 0, "answer": 1}', "line 2: invalid JSON: .* 'answer' twice"),
    "no object": ("[1]", "line 2: keys must be context, choices, answer, got"),
    "another key": (GOOD | {"label": 1}, "line 2: keys must be"),
    "no context": (
        GOOD | {"context": None},
        "line 2: context must be a non-blank string or '', got None",
    ),
    "blank context": (
        GOOD | {"context": " \n"},
        "line 2: context must be a non-blank string or ''",
    ),
    "one choice": (GOOD | {"choices": ["a"]}, "line 2: choices must be at least two strings"),
    "empty choice": (GOOD | {"choices": ["a", ""]}, "line 2: choices must be at least two strings"),
    "answer of text": (GOOD | {"answer": "b"}, "line 2: answer must be the index of one of 2"),
    "answer of bool": (GOOD | {"answer": True}, "line 2: answer must be the index of one of 2"),
    "answer beyond": (GOOD | {"answer": 2}, "line 2: answer must be the index of one of 2 choices"),
    "negative answer": (GOOD | {"answer": -1}, "line 2: answer must be the index of one of 2"),
    "surrogate": ('{"context": "\\ud800", "choices": ["a", "b"], "answer": 0}', "valid UTF-8"),
    "long choice": (
        GOOD | {"choices": ["a", "é" * 33]},
        "example 2: a choice must have at most .* = 32 tokens, got 33$",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_refused(case, tokens, tmp_path):
    line, rule = WRONG[case]
    file = tmp_path / "task.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    file.write_text(json.dumps(GOOD) + "\n" + text + "\n")
    keys = {"data__train__walk__path": f"{tokens}/tokens.train", "model__vocab_size": 300}
    config = tiny_config(str(tmp_path), **keys, **task_keys({"task": str(file)}))
    with pytest.raises(DataError, match=rule) as caught:
        build_tasks(config)
    assert "\n" not in str(caught.value)


def test_files_that_are_none_are_refused(tokens, world, folder, tmp_path):
    keys = {"data__train__walk__path": f"{tokens}/tokens.train", "model__vocab_size": 300}
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "latin").write_bytes(b"\xe9\n")
    for path in ("pipe", "absent", "empty", "latin", "."):
        config = tiny_config(str(tmp_path), **keys, **task_keys({"t": str(tmp_path / path)}))
        with pytest.raises(DataError, match="task file"):
            build_tasks(config)
    files = write_tasks(tmp_path)
    with pytest.raises(ConfigError, match=r"tasks\.files requires data\.tokenizer, because"):
        train(tiny_config(folder, **task_keys(files)), world)
    config = tiny_config(str(tmp_path), **keys | {"model__vocab_size": 40}, **task_keys(files))
    with pytest.raises(DataError, match=r"must be below model\.vocab_size = 40"):
        build_tasks(config)


def test_a_plan_says_what_scores_cost(tokens, tmp_path, capsys):
    """The plan counts padded sequences, and reports missing files and a missing tokenizer."""
    keys = {"data__train__walk__path": f"{tokens}/tokens.train", "model__vocab_size": 300}
    files = write_tasks(tmp_path)
    keys["monitors__interval"] = 0
    keys |= task_keys(files, tasks__interval=8, train__exit_step=12)
    config = tiny_config(str(tmp_path), **keys)
    dry_run(config, 2, "h100", str(tmp_path / "plan.json"))
    requests = [request for task in build_tasks(config) for request in task.requests]
    padded = sum(16 if len(request.tokens) <= 17 else 32 for request in requests)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "tasks  " in line]
    assert f"every 8 steps: {len(requests)} sequences, {padded:,} tokens in all" in line
    planned = json.loads((tmp_path / "plan.json").read_text())
    # After steps 8 and 12, on both GPUs, as fast as a forward pass of 8 sequences of 32 tokens.
    seconds = planned["time"]["forward"] * padded / (8 * 32)
    share = 100 * 2 * seconds / (planned["gpu_hours"] / 2 * 3600)
    found = re.search(r"in all, (\S+) s \(modelled\), .* adds (\S+)% to the run's time", line)
    assert float(found[1]) == pytest.approx(seconds, rel=5e-3)
    assert float(found[2]) == pytest.approx(share, abs=0.051) and share > 1
    Path(files["words"]).unlink()
    dry_run(config, 1, "h100", None)
    assert "of unknown cost: cannot read task file" in capsys.readouterr().out


def test_a_task_of_a_base_can_be_left_out(tokens, tmp_path):
    """Test leaving out one task by name, and leaving out all tasks."""
    files = write_tasks(tmp_path)
    tiny_config(str(tmp_path))
    base = tmp_path / "config.yaml"
    content = yaml.safe_load(base.read_text()) | {"tasks": {"files": files}}
    base.write_text(yaml.safe_dump(content))
    assert load_config(base, ["tasks.files.words=null"]).tasks.files.keys() == {"digits"}
    assert load_config(base, ["tasks.files=null"]).tasks.files == {}


def test_the_files_of_recipes_are_tasks(root):
    paths = [p for p in (root / "configs").glob("*.yaml") if "\ntasks:" in p.read_text()]
    files = {file for path in paths for file in load_config(path).tasks.files.values()}
    assert files == {"examples/data/kjv_choices.jsonl"}
    assert all(len(read_examples(root / file)) >= 100 for file in files)


def test_a_tokenizer_that_did_not_make_the_tokens_is_refused(tokens, tmp_path):
    """With a different tokenizer of the same size, tasks and byte counts would belong to different
    text."""
    data = shutil.copytree(tokens, tmp_path / "data")
    file = data / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    keys = {"data__train__walk__path": f"{data}/tokens.train", "model__vocab_size": 300}
    with pytest.raises(DataError, match=r"must have sha256 .* as listed in manifest"):
        build_data(tiny_config(str(tmp_path), **keys, data__validation="null"))
    build_data(tiny_config(str(tmp_path), **keys, data__validation="null", data__verify="none"))
    own = {"data__tokenizer": f"{tokens}/tokenizer.json"}  # the replacement is not used
    build_data(tiny_config(str(tmp_path), **keys, data__validation="null", **own))


@pytest.mark.parametrize(("choices", "said"), [(["a", "b", "a"], True), (["b", "a"], False)])
def test_equal_choices_are_counted_in_the_line_of_a_task(choices, said, tokens, tmp_path):
    file = tmp_path / "task.jsonl"
    rows = [GOOD, GOOD | {"choices": choices}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(text, encoding="utf-8-sig")  # with a byte order mark, as prepare_task.py reads
    keys = {"data__train__walk__path": f"{tokens}/tokens.train", "model__vocab_size": 300}
    (task,) = build_tasks(tiny_config(str(tmp_path), **keys, **task_keys({"t": str(file)})))
    assert ("; 1 examples have identical choices (ties" in str(task)) == said


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, False),
        ({"context": ""}, False),
        ({"context": "Answer: "}, True),
        ({"choices": [" a", "b"]}, True),
        ({"choices": ["a", "b\n"]}, True),
    ],
)
def test_white_space_besides_the_delimiter_is_counted_in_the_line_of_a_task(
    keys, said, tokens, tmp_path
):
    """Files made for other programs often start each choice with a space."""
    file = tmp_path / "task.jsonl"
    rows = [GOOD, GOOD | keys, GOOD | keys]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = open_tokenizer(tokens / "tokenizer.json")
    task = read_task("t", file, tokenizer, window=64, vocab_size=300, end_token=0)
    text = "; 2 examples have extra white space around a choice (context and choice are already"
    assert (text in str(task)) == said


def test_only_requests_longer_than_a_window_and_its_label_are_cut(tokens, tmp_path):
    file = tmp_path / "task.jsonl"
    file.write_text(json.dumps(GOOD | {"context": "A matrix has rows"}) + "\n")
    tokenizer = open_tokenizer(tokens / "tokenizer.json")
    read = partial(read_task, "t", file, tokenizer, vocab_size=300, end_token=None)
    longest = max(len(request.tokens) for request in read(window=100).requests)
    assert [read(window=longest - cut).cut for cut in (1, 2)] == [0, 1]


def test_sequences_have_the_lengths_that_a_layout_can_split() -> None:
    """Each context rank holds two equal chunks, which tensor-parallel ranks split."""
    for tensor, context, window in product((1, 2, 8), (1, 2, 4), (64, 96, 2048)):
        found = lengths(Layout(tensor=tensor, context=context), window)
        assert found[-1] == window and all(2 * a == b for a, b in pairwise(found))
        half, chunks = found[0] / 2, context * max(tensor, min(context, 2))
        assert all(length % chunks == 0 for length in found)
        assert half % chunks or half < SHORTEST


def test_truncation_and_padding_of_a_tokenizer_file_are_not_used(tokens, tmp_path):
    file = tmp_path / "task.jsonl"
    file.write_text(json.dumps(GOOD | {"context": "A matrix has rows and columns"}) + "\n")
    content = json.loads((tokens / "tokenizer.json").read_text())
    cut = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    pad = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
           "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}  # fmt: skip
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps(content | {"truncation": cut, "padding": pad}))
    plain, changed = (
        read_task("t", file, open_tokenizer(path), window=100, vocab_size=300, end_token=None)
        for path in (tokens / "tokenizer.json", other)
    )
    assert changed == plain


def test_scores_of_likelihoods_that_are_nan_are_nan():
    task = Task("one", [], [0, 1], [[1, 2], [1, 2]], cut=0, sha256=None)
    assert accuracies(task, [-1.0, -2.0, -math.inf, -1.0]) == (1, 1)
    assert all(map(math.isnan, accuracies(task, [-1.0, -2.0, math.nan, -1.0])))


def test_only_the_first_examples_are_scored(tokens, tmp_path):
    keys = {"data__train__walk__path": f"{tokens}/tokens.train", "model__vocab_size": 300}
    files = write_tasks(tmp_path)
    config = tiny_config(str(tmp_path), **keys, **task_keys(files, tasks__examples=3))
    tasks = build_tasks(config)
    assert [len(task.answers) for task in tasks] == [3, 3]
    rows = json_lines(Path(files["words"]))[:3]
    assert tasks[0].sizes == [list(map(len, row["choices"])) for row in rows]
    assert any(not text.isascii() for row in rows for text in row["choices"])
    assert len(read_examples(Path(files["words"]))) == 12


@pytest.mark.parametrize(("chunk", "rows"), [("null", 128), (32, 32), (1000, 128)])
def test_the_logits_of_a_pass_are_no_more_than_in_training(chunk, rows, world, tmp_path):
    """The logits of a pass, unlike those of a training step, are never computed in chunks."""
    config = tiny_config(str(tmp_path), train__loss_chunk=chunk)
    tokens = tokens_of_a_pass(config.train, config.model, world)
    assert tokens * config.model.padded_vocab == 2 * 32 * rows


def test_scoring_twice_gives_the_same(keys: dict[str, Any], world, tmp_path: Path) -> None:
    """The scores do not depend on the number of tokens per pass."""
    config = tiny_config(str(tmp_path), "adamw", **keys)
    trainer = build_trainer(config, world, *build_data(config))
    requests = build_tasks(config)[0].requests
    score = partial(log_likelihoods, trainer.model, world, requests, vocab_size=300)
    first = score(most_tokens=1)
    for most in (100, 1000):
        assert score(most_tokens=most) == pytest.approx(first, rel=1e-6)
    trainer.tasks = build_tasks(config)
    stopping = SimpleNamespace(stop_now=lambda: True)
    with pytest.raises(Interrupted):
        Loop(trainer, Hooks(lifecycle=stopping)).score()
