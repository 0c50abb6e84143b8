"""scripts/prepare_data.py: the output folder appears complete or not at all, and every error is one
line."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer

from scripts.data import preparation
from scripts.prepare_data import main
from tests.cluster.network import until
from tests.run_results import hashes
from tests.text_files import (
    TEXTS,
    hugging_face_folder,
    texts,
    write_byte_level_tokenizer,
    write_jsonl,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level_tokenizer(tmp_path_factory.mktemp("tokenizer"))


# --- all or nothing -----------------------------------------------------------------------------


def test_other_preparation_is_replaced_only_on_request(tokenizer, tmp_path, refusal) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", TEXTS)
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is not data
    command = [f"set={source}", "--tokenizer", str(tokenizer), "--output", str(out)]
    assert main(command) == 0
    first = hashes(out)
    write_jsonl(source, TEXTS[:10])
    assert "contains data from different inputs or options; pass --overwrite" in refusal(
        main(command)
    )
    assert hashes(out) == first
    assert main([*command, "--overwrite"]) == 0
    assert texts(out, "set.train") == TEXTS[:10]
    (out / "set.train.bin").write_bytes(b"")
    assert "is damaged (missing or truncated: set.train.bin" in refusal(main(command))
    assert main([*command, "--overwrite"]) == 0
    assert texts(out, "set.train") == TEXTS[:10]
    assert main([command[0], *command[3:], "--train-tokenizer", "270", "--overwrite"]) == 0
    assert texts(out, "set.train") == TEXTS[:10]
    (out / "thesis.tex").write_text("precious")
    write_jsonl(source, TEXTS)
    said = refusal(main([*command, "--overwrite"]))
    assert "contains thesis.tex, which was not written by prepare_data.py" in said
    assert (out / "thesis.tex").read_text() == "precious"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "rows.jsonl"]


@pytest.mark.parametrize("shard", [[], ["--shard", "1/2"]], ids=["whole", "shard"])
def test_an_input_that_grows_while_it_is_read_is_refused(
    shard, tokenizer, tmp_path, refusal, monkeypatch
):
    source, out = write_jsonl(tmp_path / "rows.jsonl", TEXTS[:10]), tmp_path / "out"
    load = preparation.load_tokenizer

    def grow(*arguments):
        write_jsonl(source, TEXTS)
        return load(*arguments)

    monkeypatch.setattr(preparation, "load_tokenizer", grow)
    options = ["--tokenizer", str(tokenizer), "--output", str(out), "--workers", "1", *shard]
    assert "an input changed during preparation" in refusal(main([f"set={source}", *options]))
    left = ["out.shards"] * bool(shard) + ["rows.jsonl"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGKILL, -signal.SIGKILL, ""),
        (signal.SIGINT, 130, "interrupted: nothing was written"),
    ],
)
def test_ended_run_leaves_no_output(number, code, message, tokenizer, root, tmp_path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", TEXTS * 2000)
    out = tmp_path / "out"
    command = [f"set={source}", "--tokenizer", str(tokenizer), "--workers", "2",
               "--output", str(out)]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, root / "scripts/prepare_data.py", *command],
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a shell would inherit ignoring SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    written = tmp_path / "out.preparing/set.train.bin"
    until(lambda: written.exists() and written.stat().st_size > 0, "written tokens")
    process.send_signal(number)
    said = process.communicate()[1]
    assert not out.exists()
    assert process.returncode == code and message in said and "Traceback" not in said
    assert (tmp_path / "out.preparing").exists() == (number == signal.SIGKILL)
    write_jsonl(source, TEXTS)
    assert main(command) == 0
    assert texts(out, "set.train") == TEXTS
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "rows.jsonl"]


# --- errors -------------------------------------------------------------------------------------

BAD_FILES: dict[str, tuple[bytes, str]] = {
    "latin.txt": (b"ok\n\n" * 2000 + b"caf\xe9\n",
                  r"latin.txt is not UTF-8: byte 0xe9 at offset 8003"),
    "empty.txt": (b"", r"token set set.train would be empty: no documents in .*empty.txt"),
    "data.csv": (b"a,b", r"the suffix of .*data.csv must be one of .txt.*for CSV, pass hf:FOLDER"),
    "tokens.npy": (b"\x93NUMPY", r"tokens.npy must be one of .txt.*nanoGPT.*docs/data.md"),
    "not.txt.zst": (b"plain text", r"cannot read .*not.txt.zst: "),
    "not.parquet": (b"plain text", r"cannot read .*not.parquet: "),
    "key.jsonl": (b'{"text": "a"}\n\n{"body": "b"}\n',
                  r"line 3: the row must have the key 'text', got body; .* --text-key"),
    "null.jsonl": (b'{"text": null}\n', r"line 1: 'text' must be a string, got NoneType; fix"),
    "bad.jsonl": (b'{"text": "a"}\n{"text": \n', r"line 2: invalid JSON.*remove the line"),
    "twice.jsonl": (b'{"text": "a", "text": "b"}\n', r"line 1: invalid JSON: .*'text' twice; fix"),
    "half.jsonl": (b'{"text": "\\ud800"}\n', r"is not valid Unicode: surrogates.*; fix"),
}  # fmt: skip


def check_error(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that the command exits with code 2, prints one matching error line, and leaves the
    folder unchanged."""
    before = sorted(folder.rglob("*"))
    assert main(arguments) == 2
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and re.search(message, errors[0]), captured.err
    assert "Traceback" not in captured.err and sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_bad_file_is_one_line(tokenizer, tmp_path, name, workers, capsys) -> None:
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    tokenizer = ["--tokenizer", str(tokenizer)] if workers == "2" else ["--train-tokenizer", "257"]
    check_error([f"set={tmp_path / name}", *tokenizer, "--workers", workers,
                 "--output", str(tmp_path / "out")], message, tmp_path, capsys)  # fmt: skip


BAD_COMMANDS: list[tuple[str, str]] = [
    ("--train-tokenizer 300", "no input: pass NAME=INPUT"),
    ("set={}/rows.jsonl", "pass exactly one of --train-tokenizer VOCABULARY and --tokenizer"),
    (
        "set={}/rows.jsonl --train-tokenizer 9000",
        "too little text for .* 9000 tokens; .* possible vocabulary is [34]..",
    ),
    ("set={}/nowhere.txt --train-tokenizer 300",
     "nowhere.txt must be a file, a folder or a pattern"),
    ("set={}/folder --train-tokenizer 300", "folder must contain files with suffix"),
    ("a.b={}/rows.jsonl --train-tokenizer 300", "must be NAME=INPUT .*got a.b="),
    ("set={}/rows.jsonl --validation other={}/rows.jsonl --train-tokenizer 300",
     "--validation other=INPUT requires a training set"),
    ("set={}/rows.jsonl --train-tokenizer 300 --validation-fraction 0.001",
     r"set.validation would be empty: --validation-fraction 1/1000 of \d+ doc.* is less than half "
     r"a document; set a fraction of at least 1/\d+$"),
    ("set={}/rows.jsonl --validation set={}/text.txt --train-tokenizer 300 "
     "--validation-fraction 0.1",
     "--validation-fraction has no effect if every set has --validation, got 1/10"),
    ("set={}/text.txt --train-tokenizer 259 --validation-fraction 0.001",
     "of 1 document is less than half a document; split .* with a smaller --document-bytes"),
    ("set={}/rows.jsonl --train-tokenizer 300 --validation-fraction 0.999",
     r"set.train would be empty: --validation-fraction 999/1000 of (\d+) documents holds out all "
     r"documents; set a fraction below \d+/\d+$"),
    ("set={}/text.txt --tokenizer {}/hf/tokenizer.json --eod <|endoftext|> "
     "--validation-fraction 0.5",
     "set.train would be empty: --validation-fraction 1/2 of 1 document holds out all"),
    ("set={}/twice.parquet --train-tokenizer 300", "must have one column 'text', got 2"),
    ("set={}/rows.jsonl --tokenizer {}/nowhere.json",
     "nowhere.json must be an existing file or folder"),
    ("set={}/rows.jsonl --tokenizer {}/rows.jsonl", "cannot read tokenizer"),
    ("set={}/rows.jsonl --tokenizer {}/hf", "ambiguous; pass --eod with .*<.endoftext.>, <s0>"),
    ("set={}/rows.jsonl --tokenizer {}/none", "none has no special token to mark the end"),
    ("set={}/rows.jsonl --tokenizer {}/many", "many/config.json contains <s0>, <s1>; pass --eod"),
    ("set={}/rows.jsonl --tokenizer {}/list", "list/config.json must be an object, got list"),
    ("set={}/rows.jsonl --tokenizer {}/hf --eod Q", "token 'Q' of .* must be a special token"),
    ("set={}/rows.jsonl --tokenizer {}/dropout.json", "model.dropout must be null, got 0.1: "),
    ("set={}/rows.jsonl --tokenizer {}/hf --eod <x>", "token '<x>' is not in the vocabulary"),
    ("set=hf:no-one/nothing --train-tokenizer 300",
     "cannot read hf:no-one/nothing::train: .* check the name and the network"),
    ("set=hf:{}/dataset --text-key body --train-tokenizer 300",
     "dataset::train, row 1: the row must have the key 'body', got text"),
    ("set={}/table.parquet --text-key body --train-tokenizer 300",
     "table.parquet, row 1: the row must have the key 'body', got text"),
    ("set={}/text.txt k:text={}/rows.jsonl --text-key body --train-tokenizer 300",
     "--text-key has no effect if every JSON lines, Parquet or hub input has a KEY, got body"),
    ("set={}/rows.jsonl --document-bytes 0 --train-tokenizer 300",
     "--document-bytes has no effect without .txt or .md files, got 0"),
    ("set={}/bytes.parquet --train-tokenizer 300", "cannot read .*bytes.parquet: 'utf-8' codec"),
    ("--demo --tokens 5", "--tokens has no effect with --demo, got 5"),
    ("--corpus fineweb --validation-fraction 0.1",
     "--validation-fraction has no effect with --corpus, got 1/10"),
    ("set={}/none.parquet --train-tokenizer 257", "no documents in .*none.parquet"),
    ("set={}/none.parquet --train-tokenizer 600",
     "token set set.train would be empty: no documents in .*none.parquet"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "message"), BAD_COMMANDS)
def test_bad_command_is_one_line(tokenizer, tmp_path, command, message, capsys) -> None:
    write_jsonl(tmp_path / "rows.jsonl", TEXTS)
    (tmp_path / "text.txt").write_text("A text.")
    for folder in ("folder", "dataset"):
        (tmp_path / folder).mkdir()
    write_jsonl(tmp_path / "dataset/train.jsonl", TEXTS)
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "table.parquet")
    not_utf8 = pyarrow.array([b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": not_utf8}), tmp_path / "bytes.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [""]})[:0], tmp_path / "none.parquet")
    twice = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    hugging_face_folder(tokenizer, tmp_path / "hf", 1, {})
    content = json.loads(tokenizer.read_text())
    content["model"]["dropout"] = 0.1
    (tmp_path / "dropout.json").write_text(json.dumps(content))
    size = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    hugging_face_folder(tokenizer, tmp_path / "none", 0, {})
    content = json.loads((tmp_path / "none/tokenizer.json").read_text()) | {"added_tokens": []}
    (tmp_path / "none/tokenizer.json").write_text(json.dumps(content))
    many = {"config.json": {"eos_token_id": [size, size + 1]}}
    hugging_face_folder(tokenizer, tmp_path / "many", 2, many)
    hugging_face_folder(tokenizer, tmp_path / "list", 2, {"config.json": []})
    arguments = command.replace("{}", str(tmp_path)).split()
    check_error([*arguments, "--output", str(tmp_path / "out")], message, tmp_path, capsys)
