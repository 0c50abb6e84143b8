"""scripts/prepare_task.py and the tasks of scripts/evaluate.py, both compared with lm-eval if it is
installed."""

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from parallel.comm import groups as process_groups
from scripts.evaluate import main as evaluate
from scripts.huggingface.export import export
from scripts.prepare_task import FORMATS, examples, main
from tests.paths import ROOT
from tests.run_configs import tiny_config
from tests.run_results import json_lines
from tests.task_files import task_keys, write_tasks
from tests.token_files import prepare_text
from tests.unit.training.checkpoint.test_checkpoint import forge
from training.errors import DataError
from training.run import train

TEXT = "A matrix has rows and columns, of which the number {i} is one; é is a letter.\n\n"
LABELLED = {"text": ["rows", "a [b] c", "columns", "d", "e"], "label": list("ABCDE")}
NUMBERED = {"text": ["one", "two", "three", "four"], "label": list("1234")}  # in some rows
ROWS: dict[str, list[dict[str, Any]]] = {
    "arc": [
        {"question": "What has a matrix?", "choices": LABELLED, "answerKey": "C"},
        {"question": "How many?", "choices": NUMBERED, "answerKey": "3"},
    ],
    "boolq": [{"passage": "A matrix.", "question": "is it a matrix", "label": 1}],
    "commonsense_qa": [{"question": " What is it? ", "choices": LABELLED, "answerKey": "D"}],
    "hellaswag": [
        {
            "activity_label": "Baking [substeps]",
            "ctx_a": "A man [header] bakes [title] bread.",
            "ctx_b": "he  EATS",
            "endings": ["it.", " [step] slowly,  with care.", "[title] fast", "ends [title] it."],
            "label": "2",
        }
    ],
    "openbookqa": [{"question_stem": "A matrix has", "choices": LABELLED, "answerKey": " B"}],
    "piqa": [{"goal": "Invert it", "sol1": "Divide.", "sol2": "Solve {{x}}.", "label": 0}],
    "sciq": [
        {
            "support": "  A matrix has rows.",
            "question": "What has rows?",
            "distractor1": "a",
            "distractor2": "b",
            "distractor3": "c",
            "correct_answer": "a matrix",
        },
        {
            "support": "",
            "question": "What?",
            "distractor1": "a",
            "distractor2": "b",
            "distractor3": "c",
            "correct_answer": "d",
        },
    ],
}
"""Rows in each format, including text that readers of the format change."""

LETTERS = "Question: What is it?\nA. rows\nB. a [b] c\nC. columns\nD. d\nE. e\nAnswer:"
ENDINGS = ["it.", " slowly, with care.", " fast", "ends. it."]
EXAMPLES: dict[str, list[list[Any]]] = {
    "arc": [
        ["Question: What has a matrix?\nAnswer:", LABELLED["text"], 2],
        ["Question: How many?\nAnswer:", NUMBERED["text"], 2],
    ],
    "boolq": [["A matrix.\nQuestion: is it a matrix?\nAnswer:", ["no", "yes"], 1]],
    "commonsense_qa": [[LETTERS, list("ABCDE"), 3]],
    "hellaswag": [["Baking : A man bakes. bread. He eats", ENDINGS, 2]],
    "openbookqa": [["A matrix has", LABELLED["text"], 1]],
    "piqa": [["Question: Invert it\nAnswer:", ["Divide.", "Solve {{x}}."], 0]],
    "sciq": [
        ["A matrix has rows.\nQuestion: What has rows?\nAnswer:", [*"abc", "a matrix"], 3],
        ["\nQuestion: What?\nAnswer:", [*"abcd"], 3],
    ],
}
"""The examples that lm-eval builds from these rows. A slow test compares them with lm-eval."""


def written(folder: Path, rows: list[dict[str, Any]], name: str = "rows") -> str:
    """Write rows and return the file's name."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def table(folder: Path, rows: list[dict[str, Any]]) -> str:
    """Write rows as Parquet and return the file's name."""
    content = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    pytest.importorskip("pyarrow.parquet").write_table(content, folder / "rows.parquet")
    return str(folder / "rows.parquet")


def with_lm_eval() -> Path:
    """Return the interpreter of an environment with lm-eval. If there is none, the test is
    skipped."""
    default = ROOT / ".venv-eval" / "bin" / "python"
    if importlib.util.find_spec("lm_eval") is not None:
        default = Path(sys.executable)
    python = Path(os.environ.get("LM_EVAL_PYTHON", default))
    if not python.exists():
        pytest.skip(f"lm-eval is not installed: no {python}, and LM_EVAL_PYTHON names no other")
    return python


@pytest.mark.slow
def test_the_examples_here_are_those_of_lm_eval(tmp_path):
    python = with_lm_eval()
    for name, rows in ROWS.items():
        written(tmp_path, rows, name)
    command = [str(python), str(ROOT / "tests" / "lm_eval_examples.py"), str(tmp_path)]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_format_has_the_examples_of_lm_eval(name, tmp_path):
    assert EXAMPLES.keys() == FORMATS.keys() - {"plain"}
    found = examples(written(tmp_path, ROWS[name]), name)
    assert [[each.context, each.choices, each.answer] for each in found] == EXAMPLES[name]


SCORED = 25
SCORES = [*product(("words", "digits"), ("acc", "acc_norm"))]


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run with PC layers that has scored `SCORED` examples of two tasks, and the
    files of these examples."""
    folder = tmp_path_factory.mktemp("scored")
    tokens = prepare_text(folder, TEXT, 800)
    sets = {f"data__{kind}__walk__path": f"{tokens}/tokens.train"
            for kind in ("train", "validation")}  # fmt: skip
    keys = task_keys(write_tasks(folder, examples=40), **sets, model__vocab_size=300, pc__level=2)
    world = process_groups.initialize()
    keys |= {"train__steps": 4, "train__micro_batch": 8, "checkpoint__interval": 2}
    train(tiny_config(str(folder), **keys, tasks__examples=SCORED), world)
    process_groups.shutdown()
    for name in ("words", "digits"):
        head = (folder / f"{name}.jsonl").read_text().splitlines(keepends=True)[:SCORED]
        (folder / f"{name}.jsonl").write_text("".join(head))
    return folder


def logged(folder: Path) -> dict[str, float]:
    """Return the last scores of the run, by task and metric."""
    line = json_lines(folder / "run" / "metrics.jsonl")[-1]
    return {f"{name} {key}": line[f"task/{name}/{key}"] for name, key in SCORES}


def results(output: Path) -> dict[str, float]:
    """Return the scores written by scripts/evaluate.py, by task and metric."""
    found = json.loads((output / "results.json").read_text())["results"]
    return {f"{name} {key}": found[f"file_{name}"][f"{key},none"] for name, key in SCORES}


@pytest.mark.slow
def test_scores_in_training_are_lm_evals_of_the_export(scored, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    files = [str(scored / f"{name}.jsonl") for name in ("words", "digits")]
    export(scored / "run", tmp_path / "out")
    options = ["--python", str(with_lm_eval()), "--output", str(tmp_path)]
    assert evaluate([str(tmp_path / "out"), "--tasks", *files, *options]) == 0
    assert results(tmp_path) == pytest.approx(logged(scored), abs=1e-6)


def test_a_checkpoint_is_scored_as_in_training(scored, tmp_path, capsys):
    """Score the newest checkpoint of a run. Then score an earlier checkpoint, edited to come from a
    run on two ranks with other kernels, on more examples than in the run."""
    files = [str(scored / f"{name}.jsonl") for name in ("words", "digits")]
    run = scored / "run"
    assert evaluate([str(run), "--tasks", *files, "--output", str(tmp_path)]) == 0
    assert results(tmp_path) == pytest.approx(logged(scored), abs=1e-6)
    said, newest = capsys.readouterr().out, run / "checkpoints" / "step_00000004"
    assert "| file_words | acc " in said and f"step 4 of {newest}\n" in said
    assert json.loads((tmp_path / "results.json").read_text())["model"] == str(newest)
    earlier, more = run / "checkpoints" / "step_00000002", write_tasks(tmp_path, examples=40)
    config = (earlier / "config.yaml").read_text()
    for key, old, new in (
        ("tensor", "1", "2"),
        ("attention_backend", "sdpa", "transformer_engine"),
        ("attention_kernel", "auto", "flash_attention_4"),
    ):
        assert f"\n  {key}: {old}\n" in config
        config = config.replace(f"\n  {key}: {old}\n", f"\n  {key}: {new}\n")
    forge(earlier, "config.yaml", config.encode())
    assert evaluate([str(earlier), "--tasks", more["words"], "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "| file_words | acc_norm " in said and "task file_words: 40 examples" in said


@pytest.mark.slow
@pytest.mark.parametrize("part", ["tokenizer", "weights"])
def test_a_run_is_scored_with_its_own_tokenizer_and_weights(part, scored, tmp_path, capsys):
    """A changed tokenizer file and a flipped bit in the weights are detected."""
    if part == "tokenizer":
        file, rule = scored / "d" / "tokenizer.json", "is not the run's tokenizer"
    else:
        (file,) = (scored / "run" / "checkpoints" / "step_00000004" / "state").glob("*.distcp")
        rule = "has changed since it was written"
    content = file.read_bytes()
    half = len(content) // 2
    flipped = content[:half] + bytes([content[half] ^ 64]) + content[half + 1 :]
    file.write_bytes(content + b"\n" if part == "tokenizer" else flipped)
    try:
        assert evaluate([str(scored / "run"), "--tasks", str(scored / "words.jsonl")]) == 2
    finally:
        file.write_bytes(content)
    assert rule in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["--tasks", "piqa"], "runs and checkpoints can only be scored on .jsonl tasks"),
        (["--tasks", "{words}", "--device", "cuda"], "requires an exported model"),
        (["--tasks", "{words}", "--python", "python3"], "--python python3 requires an exported"),
        (["--tasks", "{words}", "--dtype", "float16"], "--dtype must be float32 or bfloat16"),
        (["--tasks", "absent.jsonl"], "cannot read task file absent.jsonl"),
        (["--tasks", "{words}", "{words}"], "must have different names"),
        (["--tasks", "{words}"], "contains no checkpoint"),
    ],
)
def test_what_a_run_cannot_be_scored_on_is_refused(options, rule, tmp_path, capsys):
    words = write_tasks(tmp_path)["words"]
    assert evaluate([str(tmp_path), *(option.format(words=words) for option in options)]) == 2
    assert rule in capsys.readouterr().err


def test_rows_become_examples(tmp_path, capsys):
    """Test plain text, compressed files and Parquet. Keys that are not part of the format are left
    out."""
    plain = {"id": 7, "context": "one", "choices": ["a", "é"], "answer": 1}
    arc = written(tmp_path, ROWS["arc"])
    output = tmp_path / "tasks" / "arc.jsonl"
    assert main([arc, "--format", "arc", "--output", str(output)]) == 0
    assert [[*line.values()] for line in json_lines(output)] == EXAMPLES["arc"]
    assert "2 examples, 9 choices, chance accuracy 0.225" in capsys.readouterr().out
    compressed = tmp_path / "rows.jsonl.gz"
    compressed.write_bytes(gzip.compress((json.dumps(plain) + "\n").encode() * 3))
    assert main([str(compressed), "--output", str(output), "--limit", "2"]) == 0
    del plain["id"]
    assert json_lines(output) == [plain] * 2
    assert main([str(output), "--output", str(output), "--limit", "1"]) == 2
    assert "--output must not be the source file" in capsys.readouterr().err
    assert json_lines(output) == [plain] * 2
    (tmp_path / "tasks/notes.csv").touch()
    assert main([str(tmp_path / "tasks"), "--output", str(tmp_path / "out.jsonl")]) == 0
    assert "reads 1 .jsonl; ignores 1 .csv, such as" in capsys.readouterr().out
    found = list(examples(table(tmp_path, ROWS["hellaswag"]), "hellaswag"))
    assert [found[0].context, found[0].choices, found[0].answer] == EXAMPLES["hellaswag"][0]


@pytest.mark.parametrize(
    ("row", "name", "rule"),
    [
        (ROWS["arc"][0] | {"answerKey": ""}, "arc", "line 1: the row must have the format arc"),
        (
            ROWS["hellaswag"][0] | {"label": ""},
            "hellaswag",
            "line 1: the row must have the format hellaswag",
        ),
        (ROWS["boolq"][0] | {"label": -1}, "boolq", "line 1: answer must be the index of one of 2"),
        (ROWS["piqa"][0] | {"sol1": None}, "piqa", "line 1: choices must be at least two strings"),
        ([1], "plain", "line 1: rows must be objects, got a list; write one row per line: jq"),
        (
            {key: value for key, value in ROWS["piqa"][0].items() if key != "sol1"},
            "piqa",
            "line 1: the row must .* format piqa .* got no key 'sol1' among goal, sol2, label",
        ),
        (
            ROWS["arc"][0] | {"choices": {"text": ["a", "b", "c"], "label": ["A", "B"]}},
            "arc",
            "line 1: the row must have the format arc",
        ),
        (ROWS["arc"][0] | {"choices": {}}, "arc", "got no key 'text' among question, choices, ans"),
    ],
)
def test_rows_of_no_example_are_refused(row, name, rule, tmp_path, capsys):
    source = written(tmp_path, [row])
    with pytest.raises(DataError, match=rule):
        list(examples(source, name))
    assert main([source, "--format", name, "--output", str(tmp_path / "out.jsonl")]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("source", "place"),
    [(written, "line 2"), (table, "row 2"), (lambda *a: written(*a) and f"hf:{a[0]}", "row 2")],
    ids=["JSON lines", "Parquet", "a dataset"],
)
def test_the_row_of_an_error_is_named_in_any_source(source, place, tmp_path):
    wrong = {**ROWS["piqa"][0], "label": 9}
    name = source(tmp_path, [ROWS["piqa"][0], wrong, ROWS["piqa"][0]])
    with pytest.raises(DataError, match=f"{name}.*, {place}: answer must be the index of one of"):
        list(examples(name, "piqa"))


def test_sources_that_cannot_be_read_are_refused(tmp_path, capsys):
    (empty := tmp_path / "empty.jsonl").touch()
    output = ["--output", str(tmp_path / "out.jsonl")]
    for source in ("absent.jsonl", "absent.parquet", "hf:", str(tmp_path), str(empty)):
        assert main([source, *output]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    for name, rule in (("rows.txt", "rows.txt must be .parquet,"), ("rows.data", "the suffix")):
        (source := tmp_path / name).write_text(json.dumps(ROWS["piqa"][0]))
        assert main([str(source), *output]) == 2
        said = capsys.readouterr().err
        assert str(source) in said and rule in said and ".jsonl, .ndjson" in said
    assert main([written(tmp_path, ROWS["arc"]), "--output", str(tmp_path / "out")]) == 2
    assert "--output must end in .jsonl" in capsys.readouterr().err
