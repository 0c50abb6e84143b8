"""scripts/prepare_data.py on real files: its output, atomicity, and errors."""

import gzip
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
from tokenizers import Tokenizer

from scripts.data.document_files import split_text
from scripts.data.set_writer import token_dtype
from scripts.prepare_data import chosen, main, parse
from tests.commands import output_of
from tests.run_results import hashes
from tests.text_files import (
    TEXTS,
    documents,
    hugging_face_folder,
    lines,
    texts,
    write_jsonl,
    zstd_frames,
)
from training.data.manifest import Manifest, read_manifest
from training.data.token_bytes import token_byte_lengths

SCRIPT = "scripts/prepare_data.py"
DEMO_SETS = ("kjv", "jargon", "devils_dictionary")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """The demo preparation, from another working directory."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    output_of(sys.executable, root / SCRIPT, "--demo", "--output", "data/demo", folder=elsewhere)
    return elsewhere / "data/demo"


def prepare(*arguments: object) -> Manifest:
    """Prepare data, which must succeed, and return the manifest."""
    assert main([str(each) for each in arguments]) == 0
    return read_manifest(str(arguments[list(arguments).index("--output") + 1]))


def test_one_document_and_one_byte_are_singular(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("a")
    prepare(f"set={tmp_path / 'in.txt'}", "--train-tokenizer", 257, "--output", tmp_path / "out")
    assert "set.train: 1 document, 2 tokens, 1 byte of text" in capsys.readouterr().out


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
    files = hashes(demo)
    assert set(manifest.sets) == {f"{n}.{part}" for n in DEMO_SETS for part in
                                  ("train", "validation")}  # fmt: skip
    for name, entry in manifest.sets.items():
        found = documents(demo, name, keep_eod=True)
        assert entry.documents == len(found)
        assert entry.tokens == sum(map(len, found))
        assert entry.max_token == max(map(max, found))
        assert entry.bytes == sum(len(text.encode()) for text in texts(demo, name))
        assert entry.sha256 == {part: files[f"{name}.{part}"] for part in ("bin", "idx", "blocks")}
        assert entry.dtype == "uint16"
        # EOD ends every document and occurs nowhere else.
        assert all(each[-1] == 0 and 0 not in each[:-1] for each in found)
        assert len(IndexedDataset(str(demo / name))) == len(found)  # Megatron also reads it
    assert manifest.tokenizer.sha256 == files["tokenizer.json"]
    assert manifest.tokenizer.eod_id == 0
    assert manifest.files == {
        each.name: each.stat().st_size for each in demo.iterdir() if each.name != "manifest.json"
    }


def test_demo_again_says_so_and_changes_nothing(
    demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {each: each.stat().st_mtime_ns for each in demo.iterdir()}
    assert main(["--demo", "--output", str(demo)]) == 0
    assert capsys.readouterr().out == f"{demo} already holds this preparation\n"
    assert {each: each.stat().st_mtime_ns for each in demo.iterdir()} == before


def test_what_a_killed_run_left_beside_a_complete_folder_goes(demo: Path) -> None:
    lock, *folders = (
        demo.with_name(f"{demo.name}.{end}") for end in ("preparing.lock", "preparing", "replaced")
    )
    lock.touch()
    for folder in folders:
        folder.mkdir()
    assert main(["--demo", "--output", str(demo)]) == 0
    assert not any(path.exists() for path in (lock, *folders))


# --- one result from every format and number of workers -------------------------------------------


def test_result_does_not_depend_on_the_number_of_workers(
    demo: Path, root: Path, tmp_path: Path
) -> None:
    for workers in (1, 3):
        prepare(f"set={root}/examples/data/jargon.txt.xz", "--tokenizer", demo / "tokenizer.json",
                "--validation-fraction", "0.3", "--workers", workers,
                "--output", tmp_path / str(workers))  # fmt: skip
    assert hashes(tmp_path / "1") == hashes(tmp_path / "3")


def folder_of_files(path: Path) -> None:
    (path / "b").mkdir(parents=True)
    (path / "a.jsonl").write_bytes(lines(TEXTS[:20]))
    (path / "b/c.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[20:])))
    (path / "LICENSE").write_text("not data")


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
    # The text that names the special token is not it.
    assert not any(0 in ids for ids in documents(tmp_path / "out", "set.train"))
    assert list(manifest.sets) == ["set.train"]
    assert manifest.sets["set.train"].source == [str(tmp_path / name)]


def test_several_sources_of_one_name_follow_each_other(demo: Path, tmp_path: Path) -> None:
    """Texts stay whole, even if the tokenizer's file enables truncation and padding."""
    cutting = Tokenizer.from_file(str(demo / "tokenizer.json"))
    cutting.enable_truncation(3)
    cutting.enable_padding()
    cutting.save(str(tmp_path / "tokenizer.json"))
    write_jsonl(tmp_path / "b.jsonl", TEXTS[:9])
    write_jsonl(tmp_path / "a.jsonl", TEXTS[9:20])
    write_jsonl(tmp_path / "c.jsonl", TEXTS[30:])
    prepare(f"set={tmp_path}/b.jsonl", f"set={tmp_path}/[ac].jsonl",
            f"--validation=set={tmp_path}/c.jsonl",
            "--tokenizer", tmp_path / "tokenizer.json", "--output", tmp_path / "out")  # fmt: skip
    assert texts(tmp_path / "out", "set.train") == TEXTS[:20] + TEXTS[30:]
    assert texts(tmp_path / "out", "set.validation") == TEXTS[30:]


def test_each_source_has_a_key_of_its_own(demo: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:9])
    write_jsonl(tmp_path / "b.jsonl", TEXTS[9:20], key="body")
    write_jsonl(tmp_path / "c.jsonl", TEXTS[30:], key="the text")
    given = [f"set={tmp_path}/a.jsonl", f"set:body={tmp_path}/b.jsonl",
             f"--validation=set:the text={tmp_path}/c.jsonl",
             "--tokenizer", demo / "tokenizer.json", "--output", tmp_path / "out"]  # fmt: skip
    prepare(*given)
    assert texts(tmp_path / "out", "set.train") == TEXTS[:20]
    assert texts(tmp_path / "out", "set.validation") == TEXTS[30:]
    sets = read_manifest(tmp_path / "out").sets
    assert sets["set.train"].source == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl (key body)"]
    # A key belongs to the preparation's fingerprint, like the files' content.
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:9])
    rows = [{"text": text, "body": text[::-1]} for text in TEXTS]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [
        chosen(parse(["--output", "o", f"set{key}={tmp_path}/d.jsonl", "--train-tokenizer", "300"]))
        for key in ("", ":text", ":body")
    ]
    assert len({preparation.fingerprint() for preparation in keys}) == 3


def test_a_local_dataset_counts_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    options = ["--train-tokenizer", "300", "--output", str(tmp_path / "out")]
    preparation = chosen(parse([f"a=hf:{tmp_path}/set", *options]))
    found = []
    for texts_there in (TEXTS, TEXTS[:9]):
        write_jsonl(tmp_path / "set" / "rows.jsonl", texts_there)
        found.append(preparation.fingerprint())
    assert found[0] != found[1] and found[1] == preparation.fingerprint()


@given(
    pieces=st.lists(st.sampled_from(["\n", " \n", "word\n", "a longer line\n"]), max_size=80),
    size=st.sampled_from([0, 1, 20, 100]),
)
@example(pieces=["a longer line\n"] * 9, size=1)  # no blank lines to cut at
def test_text_documents_are_the_text(pieces: list[str], size: int) -> None:
    source = [piece.encode() for piece in pieces]
    found = list(split_text(source, size))
    assert b"".join(found) == b"".join(source)
    if size == 0:
        assert len(found) == bool(source)
    longest = len(b"a longer line\n")
    assert size == 0 or all(len(one) < 16 * size + longest for one in found)
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
    output_of(sys.executable, root / SCRIPT, *command, "--output", "two", folder=tmp_path)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")
    vocab = Tokenizer.from_file(str(tmp_path / "one/tokenizer.json")).get_vocab()
    held_out = {text[:4] for text in texts(tmp_path / "one", "set.validation")}
    assert len(held_out) == 1
    assert "wxyz" not in vocab or "abcd" not in vocab
    assert not held_out & {token.removeprefix("Ġ") for token in vocab}


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
    folder = hugging_face_folder(demo / "tokenizer.json", tmp_path / "hf", special, configs)
    manifest = prepare(f"set={write_jsonl(tmp_path / 'rows.jsonl', TEXTS)}",
                       "--tokenizer", folder, *options, "--output", tmp_path / "out")  # fmt: skip
    assert manifest.tokenizer.eod_id == expected
    assert manifest.tokenizer.vocab_size == 4096 + special
    found = documents(tmp_path / "out", "set.train", keep_eod=True)
    assert [each[-1] for each in found] == [expected] * len(TEXTS)
    kept = set(configs) & {"tokenizer_config.json"}
    own = {f"set.train.{suffix}" for suffix in ("bin", "idx", "blocks")}
    assert set(manifest.files) == {"tokenizer.json"} | own | kept
