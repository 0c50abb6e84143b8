"""scripts/prepare_data.py on real files: what it writes, all or nothing, and its errors."""

import fcntl
import gzip
import hashlib
import json
import lzma
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
from tokenizers import Tokenizer

from scripts.data.documents import split_text
from scripts.data.set_writer import token_dtype
from scripts.prepare_data import main
from training.manifest import Manifest, read_manifest
from training.token_bytes import token_byte_lengths

DEMO_COMMAND = ("--demo", "--output", "data/demo")
DEMO_SETS = ("kjv", "jargon", "devils_dictionary")
# Some of everything: several scripts, an emoji of four bytes, a special token as plain text.
TEXTS = [
    "The quick brown fox.\n", "Die Möwe lacht über <|endoftext|> am Meer.", "猫と帽子 🐈\n\n",
    *(f"Line {i}: the cat sat on the mat, the hat and the bat.\n" for i in range(60)),
]  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """The demo preparation, made from another working directory."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    run_command(root, *DEMO_COMMAND, cwd=elsewhere)
    return elsewhere / "data/demo"


def run_command(root: Path, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, str(root / "scripts/prepare_data.py"), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def prepare(*arguments: object) -> Manifest:
    """The manifest of a preparation that must succeed."""
    assert main([str(each) for each in arguments]) == 0
    return read_manifest(str(arguments[list(arguments).index("--output") + 1]))


def documents(folder: Path, name: str, *, keep_eod: bool = False) -> list[list[int]]:
    """The documents of a set, read by the struct module and not by the code under test."""
    index = (folder / f"{name}.idx").read_bytes()
    magic, version, code, sequences, borders = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version, borders) == (b"MMIDIDX\0\0", 1, sequences + 1)
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    tokens = np.fromfile(folder / f"{name}.bin", dtype={8: "<u2", 4: "<i4"}[code]).tolist()
    found, start = [], 0
    for length in lengths:
        found.append(tokens[start : start + length])
        start += length
    assert start == len(tokens)
    return found if keep_eod else [each[:-1] for each in found]


def texts(folder: Path, name: str) -> list[str]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in documents(folder, name)]


def contents(folder: Path) -> dict[str, str]:
    return {
        each.name: hashlib.sha256(each.read_bytes()).hexdigest()
        for each in folder.iterdir()
        if each.is_file()
    }


def write_jsonl(path: Path, rows: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: row}) + "\n" for row in rows))
    return path


# --- the demo corpus ----------------------------------------------------------------------------


def test_demo_holds_the_embedded_texts_to_the_byte(demo: Path, root: Path) -> None:
    manifest = read_manifest(demo)
    lengths = token_byte_lengths(manifest)
    assert manifest.tokenizer.vocab_size == 4096
    assert lengths is not None and len(lengths) == 4096
    for name in DEMO_SETS:
        text = lzma.decompress((root / f"examples/data/{name}.txt.xz").read_bytes()).decode()
        train, validation = texts(demo, f"{name}.train"), texts(demo, f"{name}.validation")
        # A twentieth, evenly spaced and rounded to the nearest: documents 9, 29, 49, ...
        total = len(train) + len(validation)
        held_out = set(range(9, total, 20))
        assert len(validation) == len(held_out)
        left, right = iter(train), iter(validation)
        assert "".join(next(right) if i in held_out else next(left) for i in range(total)) == text
        size = sum(
            int(lengths[ids].sum())
            for part in ("train", "validation")
            for ids in documents(demo, f"{name}.{part}")
        )
        assert size == len(text.encode())


def test_manifest_agrees_with_the_files(demo: Path) -> None:
    manifest = read_manifest(demo)
    hashes = contents(demo)
    assert set(manifest.sets) == {f"{n}.{part}" for n in DEMO_SETS for part in
                                  ("train", "validation")}  # fmt: skip
    for name, entry in manifest.sets.items():
        found = documents(demo, name, keep_eod=True)
        assert entry.documents == len(found)
        assert entry.tokens == sum(map(len, found))
        assert entry.max_token == max(map(max, found))
        assert entry.bytes == sum(len(text.encode()) for text in texts(demo, name))
        assert entry.sha256 == {part: hashes[f"{name}.{part}"] for part in ("bin", "idx")}
        assert entry.dtype == "uint16"
        # EOD ends every document and occurs nowhere else.
        assert all(each[-1] == 0 and 0 not in each[:-1] for each in found)
        assert len(IndexedDataset(str(demo / name))) == len(found)  # Megatron reads it as well
    assert manifest.tokenizer.sha256 == hashes["tokenizer.json"]
    assert manifest.tokenizer.eod_id == 0
    assert manifest.files == {
        each.name: each.stat().st_size for each in demo.iterdir() if each.name != "manifest.json"
    }


def test_demo_again_says_so_and_changes_nothing(demo: Path, root: Path, tmp_path: Path) -> None:
    before = {each: each.stat().st_mtime_ns for each in demo.iterdir()}
    said = run_command(root, "--demo", "--output", str(demo), cwd=tmp_path)
    assert said == f"{demo} already holds this preparation\n"
    assert {each: each.stat().st_mtime_ns for each in demo.iterdir()} == before


def test_corpus_files_are_the_ones_the_sources_page_states(root: Path) -> None:
    page = (root / "examples/data/SOURCES.md").read_text()
    for name in DEMO_SETS:
        file = (root / f"examples/data/{name}.txt.xz").read_bytes()
        text = lzma.decompress(file)
        expected = [hashlib.sha256(each).hexdigest() for each in (text, file)]
        assert re.search(rf"\| {name} \| `{expected[0]}` \| `{expected[1]}` \|", page)
        assert f"| {len(text):,} |" in page
    assert not re.search(r"(?m)^\w+:\d+ ", lzma.decompress(
        (root / "examples/data/kjv.txt.xz").read_bytes()).decode())  # fmt: skip


def test_corpus_script_checks_the_texts(root: Path, tmp_path: Path) -> None:
    script = root / "scripts/get_demo_corpus.sh"
    done = subprocess.run([script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("ok: ") == 3
    for name in DEMO_SETS:
        (tmp_path / f"{name}.txt.xz").write_bytes(lzma.compress(b"other"))
    done = subprocess.run([script, "--check", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert "error: the text in" in done.stderr


# --- one result from every format and number of workers -------------------------------------------


def test_result_does_not_depend_on_the_number_of_workers(
    demo: Path, root: Path, tmp_path: Path
) -> None:
    for workers in (1, 3):
        prepare(f"set={root}/examples/data/jargon.txt.xz", "--tokenizer", demo / "tokenizer.json",
                "--validation-fraction", "0.3", "--workers", workers,
                "--output", tmp_path / str(workers))  # fmt: skip
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def lines(rows: list[str]) -> bytes:
    return "".join(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows).encode()


def zstd_frames(rows: list[str]) -> bytes:
    compress = zstandard.ZstdCompressor().compress
    return compress(lines(rows[:7])) + compress(lines(rows[7:]))


def folder_of_files(path: Path) -> None:
    (path / "b").mkdir(parents=True)
    (path / "a.jsonl").write_bytes(lines(TEXTS[:20]))
    (path / "b/c.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[20:])))
    (path / "README.md").write_text("not data")


FORMATS: dict[str, Callable[[Path], object]] = {
    "plain.jsonl": lambda path: path.write_bytes(lines(TEXTS)),
    "gzip.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines(TEXTS))),
    "xz.jsonl.xz": lambda path: path.write_bytes(lzma.compress(lines(TEXTS))),
    "zstd.jsonl.zst": lambda path: path.write_bytes(zstd_frames(TEXTS)),
    "table.parquet": lambda path: pyarrow.parquet.write_table(
        pyarrow.table({"id": range(len(TEXTS)), "text": TEXTS}), path, row_group_size=10
    ),
    "folder": folder_of_files,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_tokens(demo: Path, tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / name)
    manifest = prepare(f"set={tmp_path / name}", "--tokenizer", demo / "tokenizer.json",
                       "--output", tmp_path / "out")  # fmt: skip
    assert texts(tmp_path / "out", "set.train") == TEXTS
    assert list(manifest.sets) == ["set.train"]
    assert manifest.sets["set.train"].source == [str(tmp_path / name)]


def test_hub_dataset_is_read_through_datasets(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local folder goes the same way through `datasets` as a name of the hub."""
    (tmp_path / "dataset").mkdir()
    write_jsonl(tmp_path / "dataset/train.jsonl", TEXTS)
    write_jsonl(tmp_path / "dataset/test.jsonl", TEXTS[:5])
    for split, expected in (("", TEXTS), ("::test", TEXTS[:5])):
        out = tmp_path / f"out{len(split)}"
        prepare(f"set=hf:{tmp_path}/dataset{split}", "--tokenizer", demo / "tokenizer.json",
                "--output", out)  # fmt: skip
        assert texts(out, "set.train") == expected


def test_several_sources_of_one_name_follow_each_other(demo: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", TEXTS[:9])
    write_jsonl(tmp_path / "a.jsonl", TEXTS[9:20])
    write_jsonl(tmp_path / "c.jsonl", TEXTS[30:])
    prepare(f"set={tmp_path}/b.jsonl", f"set={tmp_path}/[ac].jsonl",
            f"--validation=set={tmp_path}/c.jsonl",
            "--tokenizer", demo / "tokenizer.json", "--output", tmp_path / "out")  # fmt: skip
    assert texts(tmp_path / "out", "set.train") == TEXTS[:20] + TEXTS[30:]
    assert texts(tmp_path / "out", "set.validation") == TEXTS[30:]


@given(
    pieces=st.lists(st.sampled_from(["\n", " \n", "word\n", "a longer line\n"]), max_size=80),
    size=st.sampled_from([0, 1, 20, 100]),
)
def test_text_documents_are_the_text(pieces: list[str], size: int) -> None:
    source = [piece.encode() for piece in pieces]
    found = list(split_text(source, size))
    assert b"".join(found) == b"".join(source)
    if size == 0:
        assert len(found) == bool(source)
    for one, following in zip(found, found[1:], strict=False):
        assert len(one) >= size
        ends_blank = not one.splitlines()[-1].strip() and following.splitlines()[0].strip()
        assert ends_blank or len(one) >= 16 * size


def test_text_is_cut_at_blank_lines(demo: Path, tmp_path: Path) -> None:
    sections = [f"Section {i}\n" + "some text\n" * 100 + "\n" for i in range(10)]  # 1 kB each
    (tmp_path / "text.txt").write_text("".join(sections))
    prepare(f"set={tmp_path}/text.txt", "--tokenizer", demo / "tokenizer.json",
            "--output", tmp_path / "out")  # fmt: skip
    expected = ["".join(sections[i : i + 3]) for i in range(0, 10, 3)]
    assert texts(tmp_path / "out", "set.train") == expected


@pytest.mark.parametrize("vocab_size", [1, 65_499, 65_500, 200_000])
def test_integer_type_is_megatrons(vocab_size: int) -> None:
    assert token_dtype(vocab_size) == DType.optimal_dtype(vocab_size).__name__


# --- tokenizers ---------------------------------------------------------------------------------


def test_trained_tokenizer_is_reproducible_and_sees_training_documents_only(
    root: Path, tmp_path: Path
) -> None:
    rows = [f"{'wxyz' if i % 2 else 'abcd'} word {i}" for i in range(400)]  # odd ones are held out
    write_jsonl(tmp_path / "rows.jsonl", rows)
    command = (f"set={tmp_path}/rows.jsonl", "--train-tokenizer", "270",
               "--validation-fraction", "0.5")  # fmt: skip
    prepare(*command, "--output", tmp_path / "one")
    run_command(root, *command, "--output", str(tmp_path / "two"), cwd=tmp_path)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    vocab = Tokenizer.from_file(str(tmp_path / "one/tokenizer.json")).get_vocab()
    held_out = {text[:4] for text in texts(tmp_path / "one", "set.validation")}
    assert len(held_out) == 1
    assert "wxyz" not in vocab or "abcd" not in vocab
    assert not held_out & {token.removeprefix("Ġ") for token in vocab}


def hugging_face_folder(demo: Path, folder: Path, special: int, configs: dict[str, dict]) -> Path:
    """A tokenizer folder with `special` further special tokens <s0>, <s1>, ..."""
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<s{i}>" for i in range(special)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in configs.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("special", "configs", "options", "expected"),
    [
        (0, {}, [], 0),
        (2, {"tokenizer_config.json": {"eos_token": "<s1>"}}, [], 4097),
        (2, {"tokenizer_config.json": {"eos_token": {"content": "<s0>"}}}, [], 4096),
        (2, {"tokenizer_config.json": {}, "config.json": {"eos_token_id": 4097}}, [], 4097),
        (2, {"generation_config.json": {"eos_token_id": [1, 2]}}, ["--eod", "<s0>"], 4096),
    ],
)
def test_eod_of_an_existing_tokenizer(
    demo: Path, tmp_path: Path, special: int, configs: dict, options: list[str], expected: int
) -> None:
    folder = hugging_face_folder(demo, tmp_path / "hf", special, configs)
    manifest = prepare(f"set={write_jsonl(tmp_path / 'rows.jsonl', TEXTS)}",
                       "--tokenizer", folder, *options, "--output", tmp_path / "out")  # fmt: skip
    assert manifest.tokenizer.eod_id == expected
    assert manifest.tokenizer.vocab_size == 4096 + special
    found = documents(tmp_path / "out", "set.train", keep_eod=True)
    assert [each[-1] for each in found] == [expected] * len(TEXTS)
    kept = set(configs) & {"tokenizer_config.json"}
    assert set(manifest.files) == {"tokenizer.json", "set.train.bin", "set.train.idx"} | kept


# --- all or nothing -----------------------------------------------------------------------------


def test_other_preparation_is_replaced_only_on_request(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", TEXTS)
    out = tmp_path / "out"
    command = [f"set={source}", "--tokenizer", str(demo / "tokenizer.json"), "--output", str(out)]
    prepare(*command)
    first = contents(out)
    write_jsonl(source, TEXTS[:10])
    assert main(command) == 2
    assert "already holds another preparation; give --overwrite" in capsys.readouterr().err
    assert contents(out) == first
    prepare(*command, "--overwrite")
    assert texts(out, "set.train") == TEXTS[:10]
    (out / "set.train.bin").write_bytes(b"")
    assert main(command) == 2
    assert "is damaged: set.train.bin missing or cut" in capsys.readouterr().err
    prepare(*command, "--overwrite")
    assert texts(out, "set.train") == TEXTS[:10]
    (out / "thesis.tex").write_text("precious")
    write_jsonl(source, TEXTS)
    assert main([*command, "--overwrite"]) == 2
    assert "holds thesis.tex, which no preparation made" in capsys.readouterr().err
    assert (out / "thesis.tex").read_text() == "precious"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "rows.jsonl"]


@pytest.mark.parametrize("victim", ["the run", "a worker"])
def test_killed_run_leaves_no_output_and_no_process(
    demo: Path, root: Path, tmp_path: Path, victim: str
) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", TEXTS * 4000)
    out = tmp_path / "out"
    command = [f"set={source}", "--tokenizer", str(demo / "tokenizer.json"), "--workers", "2",
               "--output", str(out)]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, root / "scripts/prepare_data.py", *command],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    written = tmp_path / "out.preparing/set.train.bin"
    wait_for(lambda: written.exists() and written.stat().st_size > 0)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [pid for pid in children if "spawn_main" in command_line(pid)]
    assert len(workers) == 2
    os.kill(process.pid if victim == "the run" else int(workers[0]), signal.SIGKILL)
    said = process.communicate()[1]
    assert not out.exists()
    wait_for(lambda: not any(alive(pid) for pid in children))
    if victim == "a worker":
        assert process.returncode == 1
        assert "error: a worker process was killed" in said and "Traceback" not in said
        assert not (tmp_path / "out.preparing").exists()
    write_jsonl(source, TEXTS)
    prepare(*command)
    assert texts(out, "set.train") == TEXTS
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "rows.jsonl"]


def command_line(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_two_runs_do_not_write_the_same_folder(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.preparing").mkdir()
    lock = os.open(tmp_path / "out.preparing", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    source = write_jsonl(tmp_path / "rows.jsonl", TEXTS)
    command = [f"set={source}", "--tokenizer", str(demo / "tokenizer.json"),
               "--output", str(tmp_path / "out")]  # fmt: skip
    assert main(command) == 2
    assert "error: another run is preparing" in capsys.readouterr().err
    os.close(lock)
    prepare(*command)


# --- errors -------------------------------------------------------------------------------------

BAD_FILES: dict[str, tuple[bytes, str]] = {
    "latin.txt": (b"ok\n" * 2000 + b"caf\xe9\n",
                  r"latin.txt is not UTF-8: byte 0xe9 at offset 6003"),
    "empty.txt": (b"", r"set set.train would be empty: .*empty.txt gives it no documents"),
    "blank.txt": (b"\n  \n\n", r"set set.train would be empty"),
    "data.csv": (b"a,b", r"unknown suffix of .*data.csv: known are .txt"),
    "cut.txt.gz": (gzip.compress(bytes(range(128)) * 99)[:50], r"cannot read .*cut.txt.gz: "),
    "cut.txt.xz": (lzma.compress(b"x" * 9999)[:50], r"cannot read .*cut.txt.xz: "),
    "cut.txt.zst": (zstandard.compress(b"x\n" * 999)[:-3], r"cannot read .*ends inside a zstd"),
    "not.txt.zst": (b"plain text", r"cannot read .*not.txt.zst: "),
    "not.txt.xz": (b"plain text", r"cannot read .*not.txt.xz: "),
    "not.parquet": (b"plain text", r"not.parquet is not a readable Parquet file"),
    "key.jsonl": (b'{"text": "a"}\n\n{"body": "b"}\n', r"key.jsonl, line 3: no key 'text', found "),
    "list.jsonl": (b"[1]\n", r"list.jsonl, line 1: no key 'text', found a list"),
    "null.jsonl": (b'{"text": null}\n', r"line 1: 'text' must be a string, got NoneType"),
    "bad.jsonl": (b'{"text": "a"}\n{"text": \n', r"bad.jsonl, line 2: not JSON"),
    "latin.jsonl": (b'{"text": "caf\xe9"}\n', r"latin.jsonl, line 1: not JSON: .*utf-8"),
    "half.jsonl": (b'{"text": "\\ud800"}\n', r"line 1: 'text' is not Unicode text: surrogates"),
}  # fmt: skip


def check_error(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, one line on stderr that matches, nothing left in the folder."""
    before = sorted(folder.rglob("*"))
    assert main(arguments) == 2
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and re.search(message, errors[0]), captured.err
    assert "Traceback" not in captured.err
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_bad_file_is_one_line(
    demo: Path, tmp_path: Path, name: str, workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    tokenizer = ["--tokenizer", str(demo / "tokenizer.json")] if workers == "2" else [
        "--train-tokenizer", "257"]  # fmt: skip
    check_error([f"set={tmp_path / name}", *tokenizer, "--workers", workers,
                 "--output", str(tmp_path / "out")], message, tmp_path, capsys)  # fmt: skip


BAD_COMMANDS: list[tuple[str, str]] = [
    ("--train-tokenizer 300", "no NAME=INPUT is given"),
    ("set={}/rows.jsonl", "give one of --train-tokenizer VOCABULARY and --tokenizer"),
    ("set={}/rows.jsonl --train-tokenizer 300 --tokenizer x", "give one of"),
    ("set={}/rows.jsonl --train-tokenizer 300 --eod x", "--eod is for --tokenizer"),
    ("set={}/rows.jsonl --train-tokenizer 256", "must be at least 257, got 256"),
    ("set={}/rows.jsonl --train-tokenizer 9000", "too small to train .* 9000: at most [34].."),
    ("set={}/nowhere.txt --train-tokenizer 300", "no file, folder or pattern .*nowhere.txt"),
    ("set={}/*.csv --train-tokenizer 300", "no file, folder or pattern"),
    ("set={}/folder --train-tokenizer 300", "no file under .*folder has a known suffix"),
    ("rows.jsonl --train-tokenizer 300", "must be written NAME=INPUT .*got rows.jsonl"),
    ("a.b={}/rows.jsonl --train-tokenizer 300", "must be written NAME=INPUT .*got a.b="),
    ("set={}/rows.jsonl --validation other={}/rows.jsonl --train-tokenizer 300",
     "--validation other=... has no training set"),
    ("set={}/rows.jsonl --train-tokenizer 300 --validation-fraction 0.001",
     "set set.validation would be empty"),
    ("set={}/rows.jsonl --tokenizer {}/nowhere.json", "no tokenizer file or folder .*nowhere.json"),
    ("set={}/rows.jsonl --tokenizer {}/folder", "no tokenizer file .*folder/tokenizer.json"),
    ("set={}/rows.jsonl --tokenizer {}/rows.jsonl", "cannot read the tokenizer"),
    ("set={}/rows.jsonl --tokenizer {}/hf", "ambiguous: give --eod TOKEN.*<.endoftext.>, <s0>"),
    ("set={}/rows.jsonl --tokenizer {}/many", "many/config.json names <s0>, <s1>; give --eod"),
    ("set={}/rows.jsonl --tokenizer {}/hf --eod <x>", "token '<x>' is not in the vocabulary"),
    ("set=hf: --train-tokenizer 300", "must be written hf:NAME.*got hf:$"),
    ("set=hf:a:b:c:d --train-tokenizer 300", "must be written hf:NAME"),
    ("set=hf:no-one/nothing --train-tokenizer 300", "cannot read hf:no-one/nothing::train: "),
    ("set=hf:{}/dataset --text-key body --train-tokenizer 300",
     "dataset::train, row 1: no key 'body', found text"),
    ("set={}/table.parquet --text-key body --train-tokenizer 300", "no column 'body', found text"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "message"), BAD_COMMANDS)
def test_bad_command_is_one_line(
    demo: Path, tmp_path: Path, command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "rows.jsonl", TEXTS)
    for folder in ("folder", "dataset"):
        (tmp_path / folder).mkdir()
    write_jsonl(tmp_path / "dataset/train.jsonl", TEXTS)
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "table.parquet")
    hugging_face_folder(demo, tmp_path / "hf", 1, {})
    hugging_face_folder(demo, tmp_path / "many", 2, {"config.json": {"eos_token_id": [4096, 4097]}})
    arguments = command.replace("{}", str(tmp_path)).split()
    check_error([*arguments, "--output", str(tmp_path / "out")], message, tmp_path, capsys)


# --- the page -----------------------------------------------------------------------------------


def test_every_command_of_the_page_works(
    demo: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("corpus/books", "corpus/more"):
        (tmp_path / name).mkdir(parents=True)
    corpus = tmp_path / "corpus"
    (corpus / "web.jsonl.zst").write_bytes(zstd_frames(TEXTS))
    (corpus / "held_out.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"abstract": row}) + "\n" for row in TEXTS).encode())
    )
    text = lzma.decompress((root / "examples/data/devils_dictionary.txt.xz").read_bytes())
    (corpus / "books/one.txt").write_bytes(text[:60_000])
    (corpus / "more/two.txt").write_bytes(text[60_000:])
    pyarrow.parquet.write_table(pyarrow.table({"abstract": TEXTS}), corpus / "papers.parquet")
    page = (root / "docs/data.md").read_text()
    commands = re.findall(r"(?s)```bash\n(.*?)```", page)
    parsed = [shlex.split(command.replace("\\\n", " ")) for command in commands]
    assert parsed[0] == ["scripts/prepare_data.py", *DEMO_COMMAND]
    assert len(parsed) == 3
    monkeypatch.chdir(tmp_path)
    for program, *arguments in parsed[1:]:  # the first one made the fixture
        assert program == "scripts/prepare_data.py"
        assert main(arguments) == 0  # globs are quoted on the page: no shell takes part
    assert set(read_manifest("data/mine").sets) == {
        "web.train", "web.validation", "books.train", "books.validation"
    }  # fmt: skip
    assert texts(Path("data/papers"), "papers.validation") == TEXTS
