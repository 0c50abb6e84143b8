"""Evaluation of exported models: windows of the local task, the table, and invalid input."""

import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer

from scripts.data.text_tokenizer import train_tokenizer
from scripts.evaluate import main
from scripts.evaluation import process_results
from scripts.evaluation.harness import TASK_SETS, Row, Run, evaluate, rows, table
from scripts.evaluation.local_text import DOCUMENTS, write_tasks
from tests.run_configs import tiny_config
from tests.run_results import json_lines
from tests.task_files import write_tasks as write_choices
from tests.token_files import prepare_text
from training.data.token_bytes import token_byte_lengths
from training.data.token_set import TokenSet
from training.data.validation_data import ValidationData
from training.errors import InputError

TEXT = "A spectral norm is the largest singular value of a matrix; {i} is a number.\n\n"
LENGTH = 32


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A prepared folder with the set `tokens.train`."""
    return prepare_text(tmp_path_factory.mktemp("data"), TEXT, 400)


def config_of(folder: Path, prepared: Path):
    sets = ("data__train__walk__path", "data__validation__walk__path")
    keys = dict.fromkeys(sets, f"{prepared}/tokens.train")
    return tiny_config(str(folder), validation__samples=20, **keys)


def test_lm_eval_sees_the_windows_of_the_training_loop(prepared, tmp_path) -> None:
    config = config_of(tmp_path, prepared)
    assert write_tasks(tmp_path, config, prepared / "tokenizer.json", {}) == ["local_walk"]
    documents = json_lines(tmp_path / "local_walk.jsonl")
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    data = ValidationData(
        TokenSet("walk", f"{prepared}/tokens.train", LENGTH),
        samples=20,
        token_bytes=token_byte_lengths(prepared / "tokenizer.json"),
    )
    windows = [data.set.window(i)[1:].tolist() for i in range(20)]
    targets = [token for window in windows for token in window]
    assert len(documents) == 20  # no more than windows
    for document, window in zip(documents, windows, strict=True):
        # lm-eval predicts `LENGTH` tokens at a time, each window's input ending one token before.
        tokens = tokenizer.encode(document["text"], add_special_tokens=False).ids
        assert tokens[2 : LENGTH - 8] == window[2 : LENGTH - 8]
    assert 0 in targets  # documents end within the text
    # The same formula gives the loop's bits per byte of a loss of one nat per token.
    bits = len(targets) / (math.log(2) * sum(document["bytes"] for document in documents))
    assert bits == pytest.approx(data.bits_per_byte(1.0), rel=1e-12)


def test_lm_eval_sees_each_document_alone_as_training_does(prepared, tmp_path) -> None:
    config = config_of(tmp_path, prepared)
    config = replace(config, data=replace(config.data, document_mask=True))
    write_tasks(tmp_path, config, prepared / "tokenizer.json", {})
    texts = [document["text"] for document in json_lines(tmp_path / "local_walk.jsonl")]
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    tokens = TokenSet("walk", f"{prepared}/tokens.train", LENGTH)
    whole = tokenizer.decode(tokens.read(1, 20 * LENGTH).tolist(), skip_special_tokens=False)
    end = tokenizer.decode([0], skip_special_tokens=False)
    assert "".join(texts) == whole
    assert len(texts) > 2 and all(text.endswith(end) for text in texts[:-1])
    assert all(end not in text.removesuffix(end) for text in texts)


def test_the_standard_error_is_that_of_a_bootstrap_over_documents() -> None:
    generator = np.random.default_rng(0)
    sizes = generator.integers(300, 900, DOCUMENTS).astype(float)
    nats = sizes * generator.normal(1.4, 0.2, DOCUMENTS)
    items = [(-each, size) for each, size in zip(nats, sizes, strict=True)]
    drawn = generator.integers(0, DOCUMENTS, (20_000, DOCUMENTS))
    bits = nats[drawn].sum(1) / sizes[drawn].sum(1) / math.log(2)
    # The bootstrap's variance uses n instead of n - 1, and 20,000 draws are accurate to half a
    # percent; the error of a ratio is of first order.
    factor = math.sqrt(DOCUMENTS / (DOCUMENTS - 1))
    assert process_results.error_of_bits(items) == pytest.approx(bits.std() * factor, rel=0.03)


@pytest.mark.parametrize("nats", [(1.0, 2.0), (1.0, 2.0, 4.0, 9.0), (3.0,) * 5])
def test_the_error_over_documents_of_one_size_is_that_of_their_mean(nats) -> None:
    """The comparison is exact, because the bootstrap's error of a few percent would hide the n - 1
    of the variance."""
    bits = [each / 10 / math.log(2) for each in nats]
    error = process_results.error_of_bits([(-each, 10.0) for each in nats])
    assert error == pytest.approx(stdev(bits) / math.sqrt(len(bits)), abs=1e-12)


def test_another_tokenizer_is_noticed(prepared, tmp_path) -> None:
    texts = ["Quite another text, of which tokens are made: {}".format("xyz " * 50)]
    other = tmp_path / "other.json"
    other.write_bytes(train_tokenizer([*texts, *(chr(i) * 2 for i in range(97, 123))], 270))
    both = f"walk must be tokenized with {other}, got {prepared}/tokenizer.json"
    with pytest.raises(InputError, match=both):
        write_tasks(tmp_path, config_of(tmp_path, prepared), other, {})


def test_a_task_is_never_of_other_tokens(prepared, tmp_path) -> None:
    """The vocabularies are equal, but lm-eval would read different tokens from the text."""
    settings, file = json.loads((prepared / "tokenizer.json").read_text()), tmp_path / "other.json"
    file.write_text(json.dumps(settings | {"normalizer": {"type": "Replace", "pattern": {
        "String": "matrix"}, "content": "m"}}))  # fmt: skip
    config = config_of(tmp_path, prepared)
    with pytest.raises(InputError, match="tokens differ after decoding and re-encoding"):
        write_tasks(tmp_path, config, file, {})
    config = replace(config, data=replace(config.data, validation={}))
    with pytest.raises(InputError, match=r"data\.validation must contain a set"):
        write_tasks(tmp_path, config, prepared / "tokenizer.json", {})


def test_a_validation_set_that_has_changed_is_not_scored(prepared, tmp_path) -> None:
    config, key = config_of(tmp_path, prepared), "validation.walk.content"
    content = TokenSet("walk", f"{prepared}/tokens.train", LENGTH).digest
    for saved in ({}, {key: content}):
        assert write_tasks(tmp_path, config, prepared / "tokenizer.json", saved) == ["local_walk"]
    with pytest.raises(InputError, match=f"its hash must be aa, got {content:.12}"):
        write_tasks(tmp_path, config, prepared / "tokenizer.json", {key: "aa"})


LM_EVAL = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
options = dict(zip(sys.argv[5::2], sys.argv[6::2], strict=True))
output, folder = Path(options["--output_path"]), Path(options.get("--include_path", "absent"))
content = {{
    "arguments": sys.argv[1:],
    "files": {{path.name: path.read_text() for path in folder.glob("*")}},
    "offline": [os.environ.get(f"HF_{{name}}_OFFLINE") for name in ("HUB", "DATASETS")],
    "results": {{task: {{"acc,none": 0.5, "acc_norm,none": 0.6, "acc_stderr,none": "N/A"}}
                for task in options["--tasks"].split(",")}},
    "versions": {{"arc_easy": 1.0}},
}}
output.mkdir(parents=True)
(output / "results_1.json").write_text(json.dumps(content))
"""
"""A program that accepts lm-eval's options and writes them to its results."""


@pytest.mark.parametrize("standard", [["arc_easy,mmlu", "pc_paper"], []])
def test_lm_eval_gets_each_task_once(standard, prepared, tmp_path, monkeypatch, capsys):
    config, loaded = config_of(tmp_path, prepared), []
    monkeypatch.setattr("scripts.evaluate.load_whole", lambda folder, **_: loaded.append(folder))
    monkeypatch.setattr(
        "training.checkpoint.checkpoints.read_checkpoint",
        lambda run: SimpleNamespace(config=config, meta={"identity": {}}),
    )
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    model, program, chosen = tmp_path / "model", tmp_path / "program", tmp_path / "a: #b"
    for folder in (model, chosen):
        folder.mkdir()
    shutil.copy(prepared / "tokenizer.json", model)
    (model / "config.json").write_text('{"eos_token_id": 7}')
    program.write_text(LM_EVAL)
    program.chmod(0o755)
    file = write_choices(chosen)["digits"]
    options = ["--run", "run", "--python", str(program), "--dtype", "bfloat16", "--device", "cpu"]
    earlier = model / "evaluation" / "results.json"
    earlier.parent.mkdir()
    earlier.write_text("{}")
    assert main([str(model), "--tasks", "local", file, *standard, *options]) == 0
    assert loaded == [model]
    assert earlier.with_name("results.json.1").read_text() == "{}"
    printed = capsys.readouterr().out
    assert f"renamed the earlier {earlier} to results.json.1\n" in printed
    seen = json.loads((model / "evaluation" / "lm_eval" / "results_1.json").read_text())
    given = dict(zip(seen["arguments"][4::2], seen["arguments"][5::2], strict=True))
    tasks = ["local_walk", "file_digits", *(["mmlu", *TASK_SETS["pc_paper"]] if standard else [])]
    assert sorted(given["--tasks"].split(",")) == sorted(tasks)
    assert given["--model_args"] == f"pretrained={model},dtype=bfloat16,prefix_token_id=7"
    assert given["--device"] == "cpu"
    assert seen["offline"] == ([None, None] if standard else ["1", "1"])
    task = yaml.safe_load(seen["files"]["file_digits.yaml"])
    assert task["task"] == "file_digits" and task["dataset_kwargs"]["data_files"]["test"] == file
    local = seen["files"]["local_walk.yaml"]
    found = process_results.process_results({"bytes": 9}, [-2.0])
    assert set(re.findall(r"metric: (\w+)", local)) == found.keys()
    assert set(found.values()) == {(-2.0, 9)}
    functions = re.findall(r"!function local_text\.(\w+)", local)
    assert len(functions) == 2 and all(f"def {name}(" in seen["files"]["local_text.py"]
                                       for name in functions)  # fmt: skip
    kept = json.loads((model / "evaluation" / "results.json").read_text())
    assert kept.pop("model") == str(model)
    assert kept.pop("command") == [str(program), *seen["arguments"]]
    assert kept == {key: seen[key] for key in ("results", "versions")}
    text = (model / "evaluation" / "results.md").read_text()
    assert text in printed
    assert text.count("| acc ") == len(tasks) - 4 * bool(standard)  # four tasks by acc_norm alone
    assert ("mean of pc_paper" in text) == bool(standard)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["piqa", "--run", "a"], "--run has no effect without --tasks local, got a"),
        (["local"], "--tasks local requires --run"),
        (["piqa", "--python", "nowhere/python"], "nowhere/python does not exist; create"),
    ],
)
def test_options_that_miss_another_are_refused(options, rule, tmp_path, refusal) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert rule in refusal(main([str(tmp_path), "--tasks", *options]))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("WORLD_SIZE", "2", "WORLD_SIZE must be 1 or unset, got 2"),
        ("RANK", "abc", "RANK must be a non-negative integer, got 'abc'"),
    ],
)
def test_a_checkpoint_is_scored_by_one_rank(name, value, rule, tmp_path, monkeypatch, refusal):
    task = tmp_path / "a.jsonl"
    task.write_text('{"context": "a", "choices": ["b", "c"], "answer": 0}\n')
    monkeypatch.setenv(name, value)
    assert rule in refusal(main([str(tmp_path), "--tasks", str(task)]))


def test_results_of_an_earlier_evaluation_are_not_those_of_this_one(tmp_path) -> None:
    for name in ("config.json", "results_1.json"):
        (tmp_path / name).write_text("{}")
    run = Run(model=tmp_path, tasks=["a"], python=Path("/bin/true"), output=tmp_path)
    with pytest.raises(InputError, match="code 0 and wrote no results"):
        evaluate(run, offline=True)


def test_results_of_another_evaluation_at_the_same_time_are_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    writer = tmp_path / "writes_two"
    writer.write_text(f"#!/bin/sh\ntouch {tmp_path}/results_1.json {tmp_path}/results_2.json\n")
    writer.chmod(0o755)
    run = Run(model=tmp_path, tasks=["a"], python=writer, output=tmp_path)
    with pytest.raises(InputError, match="another evaluation wrote .* results_1.json and"):
        evaluate(run, offline=True)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["--num_fewshot", "0", "--num_fewshot=5"], "--num_fewshot is already set by an earlier"),
        (
            ["-L", "5", "--limit", "6"],
            "--limit is already set by an earlier option; remove --limit",
        ),
        (["--model", "vllm"], "--model is already set by evaluate.py"),
        (["-t", "piqa"], "--tasks is already set by evaluate.py; remove -t"),
        (["--output_path=x"], "--output_path is already set by evaluate.py"),
        (["--include_path", "x"], "--include_path is already set by evaluate.py"),
        (["--model_args", "max_length=9,pretrained=other"], "--model_args must not set pretrained"),
        (["--model_args", "max_length=9", "dtype=float16"], "--model_args must not set dtype"),
    ],
)
def test_options_that_lm_eval_would_replace_are_refused(options, rule, tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    run = Run(model=tmp_path, tasks=["a"], python=Path("x"), output=tmp_path,
              task_folder=tmp_path, options=options)  # fmt: skip
    with pytest.raises(InputError, match=rule):
        run.command()


def test_own_options_of_lm_eval_are_passed(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    options = ["--batch_size", "32", "--model_args", "max_length=9", "--include_path", "tasks",
               "--gen_kwargs", "a=-1", "--gen_kwargs", "b=2"]  # fmt: skip
    run = Run(model=tmp_path, tasks=["a"], python=Path("x"), output=tmp_path, options=options)
    command = run.command()
    assert command[-len(options) :] == options and command.count("--batch_size") == 1
    plain = Run(model=tmp_path, tasks=["a"], python=Path("x"), output=tmp_path).command()
    assert plain[-2:] == ["--batch_size", "8"]


def test_the_table_of_the_pc_paper_has_its_accuracies() -> None:
    sets = {"pc_paper": TASK_SETS["pc_paper"]}
    values = {"acc": 0.5, "acc_stderr": 0.02, "acc_norm": 0.6, "acc_norm_stderr": 0.03}
    of_task = {f"{name},none": value for name, value in values.items()}
    results = dict.fromkeys(TASK_SETS["pc_paper"], of_task)
    listed = rows(results, sets.values())
    found = {row.task: (row.metric, row.value, row.error) for row in listed}
    assert len(found) == len(listed) == 9 and found["hellaswag"] == ("acc_norm", 0.6, 0.03)
    assert found["piqa"] == ("acc", 0.5, 0.02)
    # Four of the nine by acc_norm.
    error = math.sqrt(4 * 0.03**2 + 5 * 0.02**2) / 9
    line = f"| mean of pc_paper | accuracy | {(4 * 0.6 + 5 * 0.5) / 9:.4f} | {error:.4f} |"
    other = Row("mmlu", "acc", 0.9, 0.1)  # belongs to no set
    assert line in table([*listed, other], sets) and "mean" not in table(listed[1:], sets)


def test_a_mean_with_an_unknown_error_has_no_error() -> None:
    listed = [Row(task, "acc", 0.5, None if task == "boolq" else 0.1) for task in ("boolq", "piqa")]
    line = "| mean of both | accuracy | 0.5000 |  |"
    assert line in table(listed, {"both": {"boolq": ("acc",), "piqa": ("acc",)}})


def test_metrics_of_every_filter_are_listed() -> None:
    values = {
        "alias": "gsm8k",
        "exact_match,strict-match": 0.2,
        "exact_match_stderr,strict-match": 0.1,
    }
    values |= {"exact_match,none": 0.3, "exact_match_stderr,none": "N/A"}
    assert rows({"gsm8k": values}) == [
        Row("gsm8k", "exact_match,strict-match", 0.2, 0.1),
        Row("gsm8k", "exact_match", 0.3, None),
    ]


def test_an_error_that_lm_eval_does_not_compute_is_that_of_the_task() -> None:
    """A single document has no standard error."""
    alone = process_results.error_of_bits([(-2.0, 9.0)])
    for error, shown in ((0.1, 0.1), (alone, None)):
        values = {"bits_per_byte_standard_error,none": error, "bits_per_byte_stderr,none": "N/A"}
        (row,) = rows({"local_a": {"bits_per_byte,none": 1.5, **values}})
        assert row == Row("local_a", "bits_per_byte", 1.5, shown)


def test_a_module_of_the_working_directory_is_not_lm_eval(tmp_path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "lm_eval.py").write_text("from pathlib import Path; Path('executed').touch()\n")
    monkeypatch.chdir(tmp_path)
    run = Run(model=tmp_path, tasks=["a"], python=Path(sys.executable), output=tmp_path / "out")
    with pytest.raises(InputError, match="lm-eval exited with code"):
        evaluate(run, offline=True)
    assert not (tmp_path / "executed").exists()
