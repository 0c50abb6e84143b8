"""scripts/prepare_data.py on real files: output, atomicity and errors."""

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import DType
from tokenizers import Tokenizer

from scripts.data import preparation
from scripts.data.document_files import split_text
from scripts.data.plan import Preparation
from scripts.data.set_writer import token_dtype
from scripts.prepare_data import chosen, main, parse
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
from training.data import document_index
from training.data.manifest import Manifest, read_manifest

SIZE = 300


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer trained by the script."""
    folder = tmp_path_factory.mktemp("tokenizer")
    prepare(f"set={write_jsonl(folder / 'rows.jsonl', TEXTS)}", "--train-tokenizer", SIZE,
            "--output", folder / "out")  # fmt: skip
    return folder / "out/tokenizer.json"


def prepare(*arguments: object) -> Manifest:
    """Prepare data, which must succeed, and return the manifest."""
    assert main([str(each) for each in arguments]) == 0
    return read_manifest(str(arguments[list(arguments).index("--output") + 1]))


def test_one_document_and_one_byte_are_singular(tmp_path, capsys) -> None:
    (tmp_path / "in.txt").write_text("a")
    prepare(f"set={tmp_path / 'in.txt'}", "--train-tokenizer", 257, "--output", tmp_path / "out")
    assert "set.train: 1 document, 2 tokens, 1 byte of text" in capsys.readouterr().out


# --- one result from every format and number of workers -------------------------------------------


def test_result_does_not_depend_on_the_number_of_workers(tokenizer, root, tmp_path) -> None:
    for workers in (1, 3):
        prepare(f"set={root}/examples/data/jargon.txt.xz", "--tokenizer", tokenizer,
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
def test_every_format_gives_the_same_tokens(tokenizer: Path, tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / name)
    manifest = prepare(f"set={tmp_path / name}", "--tokenizer", tokenizer,
                       "--output", tmp_path / "out")  # fmt: skip
    assert texts(tmp_path / "out", "set.train") == TEXTS
    # The text that names the special token is not it.
    assert not any(0 in ids for ids in documents(tmp_path / "out", "set.train"))
    assert list(manifest.sets) == ["set.train"]
    assert manifest.sets["set.train"].source == [str(tmp_path / name)]


def test_several_sources_of_one_name_follow_each_other(tokenizer: Path, tmp_path: Path) -> None:
    """Texts are not truncated or padded, even if the tokenizer file enables truncation and
    padding."""
    cutting = Tokenizer.from_file(str(tokenizer))
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


def test_each_source_has_a_key_of_its_own(tokenizer: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS[:9])
    write_jsonl(tmp_path / "b.jsonl", TEXTS[9:20], key="body")
    write_jsonl(tmp_path / "c.jsonl", TEXTS[30:], key="the text")
    given = [f"set={tmp_path}/a.jsonl", f"set:body={tmp_path}/b.jsonl",
             f"--validation=set:the text={tmp_path}/c.jsonl",
             "--tokenizer", tokenizer, "--output", tmp_path / "out"]  # fmt: skip
    prepare(*given)
    assert texts(tmp_path / "out", "set.train") == TEXTS[:20]
    assert texts(tmp_path / "out", "set.validation") == TEXTS[30:]
    sets = read_manifest(tmp_path / "out").sets
    assert sets["set.train"].source == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl (key body)"]


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


def test_text_is_cut_at_blank_lines(tokenizer: Path, tmp_path: Path) -> None:
    sections = [f"Section {i}\n" + "some text\n" * 100 + "\n" for i in range(10)]  # 1 kB each
    (tmp_path / "text.txt").write_text("".join(sections))
    prepare(f"set={tmp_path}/text.txt", "--tokenizer", tokenizer, "--output", tmp_path / "out")
    expected = ["".join(sections[i : i + 3]) for i in range(0, 10, 3)]
    assert texts(tmp_path / "out", "set.train") == expected


@pytest.mark.parametrize("name", ["a.txt", "a.md.gz", "a.jsonl"])
def test_a_byte_order_mark_is_no_text(tokenizer: Path, tmp_path: Path, name: str) -> None:
    """Inside a text, the mark is kept as a zero-width space."""
    text = "one\ufefftwo"
    rows = (f'{{"text": "{text}"}}' if name == "a.jsonl" else text).encode()
    marked = b"\xef\xbb\xbf" + rows
    (tmp_path / name).write_bytes(gzip.compress(marked) if name.endswith("gz") else marked)
    prepare(f"a={tmp_path / name}", "--tokenizer", tokenizer, "--output", tmp_path / "out")
    assert texts(tmp_path / "out", "a.train") == [text]


@pytest.mark.parametrize("vocab_size", [1, 65_499, 65_500, 200_000])
def test_integer_type_is_megatrons(vocab_size: int) -> None:
    assert token_dtype(vocab_size) == DType.optimal_dtype(vocab_size).__name__
    integers = {kind.name: kind.value for kind in DType if "int" in kind.name}
    assert integers == document_index.CODES


# --- tokenizers ---------------------------------------------------------------------------------


def test_a_tokenizer_is_trained_on_an_equal_share_of_every_set(tmp_path, monkeypatch) -> None:
    """The tokenizer is trained on the first training documents, and on no held-out documents."""
    monkeypatch.setattr(preparation, "TOKENIZER_BYTES", 3000)
    seen: list[str] = []
    train = preparation.train_tokenizer
    monkeypatch.setattr(
        preparation, "train_tokenizer", lambda rows, size: train(seen.extend(rows) or seen, size)
    )
    sets = {name: [f"{name} {i:04}" for i in range(400)] for name in "abc"}
    files = [write_jsonl(tmp_path / f"{name}.jsonl", rows) for name, rows in sets.items()]
    options = ["--train-tokenizer", 257, "--validation-fraction", "0.5"]
    prepare(*(f"{file.stem}={file}" for file in files), *options, "--output", tmp_path / "out")
    train_rows = [[*texts(tmp_path / "out", f"{name}.train")] for name in sets]
    assert [len(rows) for rows in train_rows] == [200] * 3
    assert seen == [text for rows in train_rows for text in rows[: -(-1000 // 6)]]


@pytest.mark.parametrize(
    ("special", "configs", "options", "expected"),
    [
        (0, {}, [], 0),
        (
            2,
            {"tokenizer_config.json": {"eos_token": "<s1>"}, "config.json": {"eos_token_id": SIZE}},
            [],
            SIZE + 1,
        ),
        (2, {"tokenizer_config.json": {"eos_token": {"content": "<s0>"}}}, [], SIZE),
        (2, {"tokenizer_config.json": {}, "config.json": {"eos_token_id": SIZE + 1}}, [], SIZE + 1),
        (2, {"generation_config.json": {"eos_token_id": [1, 2]}}, ["--eod", "<s0>"], SIZE),
    ],
)
def test_eod_of_an_existing_tokenizer(tokenizer, tmp_path, special, configs, options, expected):
    folder = hugging_face_folder(tokenizer, tmp_path / "hf", special, configs)
    manifest = prepare(f"set={write_jsonl(tmp_path / 'rows.jsonl', TEXTS)}",
                       "--tokenizer", folder, *options, "--output", tmp_path / "out")  # fmt: skip
    assert manifest.tokenizer.eod_id == expected
    assert manifest.tokenizer.vocab_size == SIZE + special
    found = documents(tmp_path / "out", "set.train", keep_eod=True)
    assert [each[-1] for each in found] == [expected] * len(TEXTS)
    kept = set(configs) & {"tokenizer_config.json"}
    own = {f"set.train.{suffix}" for suffix in ("bin", "idx", "blocks")}
    assert set(manifest.files) == {"tokenizer.json"} | own | kept


def test_data_of_the_hub_is_not_said_to_be_unchanged(tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("scripts.data.folder.holds_preparation", lambda *_, **__: True)
    monkeypatch.setattr(Preparation, "check", lambda self: [])
    (tmp_path / "a.txt").write_text("text")
    options = ["--tokenizer", str(tokenizer), "--output", str(tmp_path / "out")]
    for source, end in (
        ("hf:no-one/nothing", "; hub datasets are not"),
        (f"{tmp_path}/a.txt", "\n"),
    ):
        assert main([f"a={source}", *options]) == 0
        assert f"already contains this data{end}" in capsys.readouterr().out
