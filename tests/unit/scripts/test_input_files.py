"""Input files for scripts/prepare_data.py that are read, ignored, reported or rejected."""

import gzip
import json
import lzma
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from scripts.data import preparation
from scripts.data.compression import read_lines
from scripts.data.corpora import read_corpora
from scripts.data.document_files import CHECKED, ReadOptions, read_documents
from scripts.data.plan import Portion, Preparation, SetPlan
from scripts.data.preparation import Pipeline
from scripts.data.resume_point import Progress
from scripts.data.sources import Input, Position, find_inputs
from scripts.prepare_data import main
from tests.text_files import TEXTS, lines, write_jsonl
from training.errors import DataError


def texts(inputs: Sequence[Input]) -> list[str]:
    """Return the documents of inputs."""
    return [text for _, text in read_documents(inputs, ReadOptions())]


def read(source: Path) -> list[str]:
    """Return the documents of a file or folder."""
    return texts(find_inputs(str(source)).inputs)


def zst(content: bytes) -> bytes:
    packed: bytes = pyarrow.compress(content, codec="zstd", asbytes=True)
    return packed


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress, "xz": lzma.compress, "zst": zst
}  # fmt: skip

# --- files of a folder --------------------------------------------------------------------------


def mixed_folder(folder: Path) -> None:
    (folder / ".cache").mkdir(parents=True)
    for i, (name, pack) in enumerate(
        {"a.jsonl.gz": gzip.compress, "b.json.gz": gzip.compress, "c.jsonl.zstd": zst,
         "d.ndjson": bytes, "e.json": bytes, "f.ndjson.xz": lzma.compress}.items()
    ):  # fmt: skip
        (folder / name).write_bytes(pack(lines([TEXTS[i]])))
    for name in (".hidden.jsonl", ".cache/z.txt", "data.csv", "more.csv", "dataset_info.json"):
        (folder / name).write_text("not a document")


def test_rows_are_read_by_every_name_and_hidden_files_are_not(tmp_path, monkeypatch) -> None:
    def in_reverse(*arguments, **options):
        """List names in reverse order, as another file system might."""
        for parent, folders, files in walk(*arguments, **options):
            folders.sort(reverse=True)
            yield parent, folders, sorted(files, reverse=True)

    walk = os.walk
    monkeypatch.setattr(os, "walk", in_reverse)
    mixed_folder(tmp_path / "in/deep")
    assert read(tmp_path / "in") == TEXTS[:6]
    (found,) = find_inputs(f"{tmp_path}/**/*.ndjson").inputs
    assert str(found) == f"{tmp_path}/in/deep/d.ndjson"


def test_what_is_read_and_ignored_is_one_line_a_set(tmp_path, capsys) -> None:
    mixed_folder(tmp_path / "in")
    (tmp_path / "README.md").write_text("About the data.\n")
    command = [f"web={tmp_path}/in", f"notes={tmp_path}/README.md", "--train-tokenizer", "257"]
    assert main([*command, "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    kinds = "1 .jsonl.gz, 1 .json.gz, 1 .jsonl.zstd, 1 .ndjson, 1 .json, 1 .ndjson.xz"
    ignored = f"2 .csv, 1 .json, such as {tmp_path}/in/data.csv"
    assert f"token set web reads {kinds}; ignores {ignored}\n" in said.out
    assert "token set notes reads 1 .md\n" in said.out and "warning" not in said.err


@pytest.mark.parametrize("name", ["README.md", "LICENSE.txt", "sub/CITATION.md.gz"])
def test_text_beside_rows_is_warned_of(tmp_path, capsys, name) -> None:
    mixed_folder(tmp_path / "in")
    (tmp_path / "in/sub").mkdir()
    content = b"About the data.\n"
    (tmp_path / "in" / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    command = [f"web={tmp_path}/in", "--train-tokenizer", "257", "--output", str(tmp_path / "out")]
    assert main(command) == 0
    said = f"token set web: JSON or Parquet files are mixed with 1 text files ({Path(name).name})"
    assert f"warning: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "warned"),
    [
        (("a.jsonl", "a.jsonl.gz"), True),
        (("a.txt", "a.md"), True),
        (("a.json", "b.jsonl", "b.parquet"), True),
        (("a.jsonl", "a.b.jsonl", "sub/a.jsonl.gz"), False),
    ],
)
def test_files_that_differ_only_in_the_suffix_are_warned_of(names, warned, tmp_path) -> None:
    (tmp_path / "sub").mkdir()
    for name in names:
        (tmp_path / name).write_text("")
    warnings = list(find_inputs(str(tmp_path)).warnings())
    assert any("differ only in their suffix" in text for text in warnings) is warned


@pytest.mark.parametrize(
    ("names", "warned"),
    [
        (("data/train-1.jsonl", "data/test-1.jsonl", "Valid/a.jsonl"), "2 files of held-out"),
        (("wiki.train.txt", "wiki.dev.txt"), "1 file of held-out splits, such as {}/wiki.dev.txt,"),
        (("train/a.jsonl", "train/test.jsonl", "testing.jsonl", "latest.jsonl"), None),
        (("test/a.jsonl", "test/b.jsonl"), None),
        (("a-000-of-003.jsonl", "a-002-of-003.jsonl"), "only 2 of 3 files {}/a-*-of-003.jsonl are"),
        (("a-000-of-002.jsonl", "a-001-of-002.jsonl", "b-00-of-01.jsonl"), None),
    ],
)
def test_splits_and_missing_parts_of_a_folder_are_warned_of(names, warned, tmp_path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(lines(TEXTS[:1]) if name.endswith("jsonl") else b"Text.")
    portion = Portion(inputs=find_inputs(str(tmp_path)).inputs, source=[])
    held_out = replace(portion, held_out=True)
    said = Preparation(sets=[SetPlan("web", [portion])]).check()
    apart = Preparation(sets=[SetPlan("web", [replace(portion, inputs=[]), held_out])]).check()
    if warned is None:
        assert said == []
    else:
        (line,) = said
        assert line.startswith(f"token set web: {warned.format(tmp_path)}")
    assert apart == [each for each in said if "held-out" not in each]


def test_replaced_characters_and_inputs_beyond_the_token_limit_are_said(tmp_path, capsys) -> None:
    write_jsonl(tmp_path / "a.jsonl", [TEXTS[0], "caf\ufffd"])
    write_jsonl(tmp_path / "b.jsonl", TEXTS)
    command = [f"web={tmp_path}/a.jsonl", f"web={tmp_path}/b.jsonl", "--train-tokenizer", "257"]
    for limit, expected in ("3", True), ("1e9", False):
        output = str(tmp_path / limit)
        assert main([*command, "--tokens", limit, "--output", output]) == 0
        said = capsys.readouterr()
        left = f"the token limit is reached; not read: 1 of 2 inputs, from {tmp_path}/b.jsonl on"
        assert (left in said.out) is expected
        checked = len(TEXTS) + 2
        assert f"token set web: 1 of the first {checked} documents contains U+FFFD" in said.err


def test_the_end_token_and_a_shortened_tokenizer_training_are_said(tmp_path, capsys, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    command = [f"web={tmp_path}/a.jsonl", "--train-tokenizer", "257", "--output"]
    assert main([*command, str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "vocabulary 257, end-of-document token <|endoftext|> (id 0)\n" in said
    assert "characters of web" not in said
    monkeypatch.setattr(preparation, "TOKENIZER_BYTES", len(TEXTS[0]))
    assert main([*command, str(tmp_path / "other")]) == 0
    line = f"tokenizer training uses the first {len(TEXTS[0])} characters of web"
    assert line in capsys.readouterr().out


def test_links_and_closed_folders_are_not_left_out_in_silence(tmp_path: Path) -> None:
    mixed_folder(tmp_path / "elsewhere")
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", TEXTS[:1])
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "b.jsonl").symlink_to(tmp_path / "elsewhere/e.json")
    (folder / "sub").mkdir()
    for source, ignored in (
        (folder, "1 linked folder"),
        (f"{folder}/*", "1 linked folder, 1 folder"),
    ):
        found = find_inputs(str(source))
        assert len(found.inputs) == 2 and f"ignores {ignored}, such as" in str(found)
    write_jsonl(folder / "sub/d.jsonl", TEXTS[:1])
    assert len(find_inputs(f"{folder}/**/*.jsonl").inputs) == 3
    assert not find_inputs(f"{folder}/sub/**").ignored
    (folder / "c.jsonl").symlink_to(tmp_path / "nowhere")
    for source in (folder, f"{folder}/*.jsonl"):
        with pytest.raises(DataError, match=r"c\.jsonl is a broken symlink"):
            find_inputs(str(source))


def test_prepared_folders_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the output is inside the input folder, a second preparation would otherwise read
    tokenizer.json."""
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    command = [f"web={tmp_path}", "--train-tokenizer", "257", "--output"]
    for output in ("out", "out", "sub/other"):
        assert main([*command, str(tmp_path / output)]) == 0
    assert main([*command, str(tmp_path / "parts"), "--shard", "1/2"]) == 0
    for source in (tmp_path, f"{tmp_path}/**/*.json*"):
        found = find_inputs(str(source))
        assert [str(each) for each in found.inputs] == [f"{tmp_path}/a.jsonl"]
        assert "ignores 3 prepared folder" in str(found)
    assert len(find_inputs(f"{tmp_path}/sub/other/*.json").inputs) == 2  # named without a pattern
    said = capsys.readouterr().out
    assert "out already contains this data" in said
    assert "ignores 1 prepared folder, such as" in said
    for name in ("killed.preparing", "killed.preparing.state", "killed.replaced"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "b.json", TEXTS)
    assert len(find_inputs(str(tmp_path)).inputs) == 4  # names alone are not enough
    (tmp_path / "killed.preparing.lock").touch()
    assert len(find_inputs(str(tmp_path)).inputs) == 1


def test_files_of_save_to_disk_are_named_as_such(tmp_path, refusal, monkeypatch) -> None:
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    rows.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "dict"))
    for name in ("plain", "dict"):
        command = [f"a={tmp_path}/{name}", "--train-tokenizer", "257"]
        said = refusal(main([*command, "--output", str(tmp_path / "out")]))
        assert "was written by datasets' save_to_disk; convert it to Parquet: python -c " in said
        code = re.search('python -c "(.*)"', said)
        assert code is not None
        monkeypatch.chdir(tmp_path)
        exec(code[1], {})  # the recommended line works
        assert read(tmp_path / f"{name}.parquet") == TEXTS


# --- compressed content -------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json.zst", "rows.ndjson.xz"])
def test_content_decides_where_a_suffix_is_wrong(tmp_path: Path, suffix: str, name: str) -> None:
    (tmp_path / name).write_bytes(COMPRESS[suffix](lines(TEXTS)))
    assert read(tmp_path / name) == TEXTS


@pytest.mark.parametrize("suffix", COMPRESS)
def test_streams_follow_each_other(tmp_path: Path, suffix: str) -> None:
    path, pack = tmp_path / f"rows.jsonl.{suffix}", COMPRESS[suffix]
    parts = [lines(TEXTS[:9]), b"", lines(TEXTS[9:])]
    path.write_bytes(b"".join(map(pack, parts)))
    assert read(path) == TEXTS


@pytest.mark.parametrize("padding", [0, 4, 8, 1 << 21])
def test_padding_between_xz_streams_is_skipped(tmp_path: Path, padding: int) -> None:
    path, zeros = tmp_path / "rows.jsonl.xz", bytes(padding)
    first, second = lzma.compress(lines(TEXTS[:9])), lzma.compress(lines(TEXTS[9:]))
    path.write_bytes(first + zeros + second + zeros)
    assert read(path) == TEXTS


def test_a_skippable_zstd_frame_is_skipped(tmp_path: Path) -> None:
    frame = struct.pack("<II", 0x184D2A5E, 3) + b"abc"
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(frame + zst(lines(TEXTS[:9])) + frame + zst(lines(TEXTS[9:])) + frame)
    assert read(path) == TEXTS


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("damage", ["second", "cut", "garbage", "one byte", "half a head"])
def test_no_stream_ends_early(tmp_path: Path, suffix: str, damage: str) -> None:
    path, pack = tmp_path / f"rows.jsonl.{suffix}", COMPRESS[suffix]
    second = pack(lines(TEXTS))
    middle = len(second) // 2
    path.write_bytes(pack(lines(TEXTS[:9])) + {
        "second": second[:middle] + bytes([second[middle] ^ 0xFF]) + second[middle + 1 :],
        "cut": second[:-1],
        "garbage": b"garbage",
        "one byte": b"\n",
        "half a head": second[:3],
    }[damage])  # fmt: skip
    with pytest.raises(DataError, match=r"cannot read .*: it is corrupt: "):
        read(path)


@pytest.mark.parametrize("zeros", [1, 2, 3, 5])
def test_padding_of_another_size_is_refused(tmp_path: Path, zeros: int) -> None:
    for rest in (b"", lzma.compress(b"")):
        (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"text") + bytes(zeros) + rest)
        with pytest.raises(DataError, match=rf"corrupt: stream padding .* got {zeros}"):
            read(tmp_path / "a.txt.xz")


def test_xz_content_is_what_the_program_writes(tmp_path: Path) -> None:
    """Test content larger than one read, in several blocks and several streams, as written by `xz
    -T` and `cat`."""
    content = b"".join(b"%d " % i * 40 + b"\n" for i in range(40_000))
    assert len(content) > 1 << 22
    packed = subprocess.run(["xz", "-0", "-T2", "--block-size=65536"], input=content,
                            capture_output=True, check=True).stdout  # fmt: skip
    path = tmp_path / "a.txt.xz"
    path.write_bytes(packed + packed)
    assert b"".join(read_lines(path)) == content + content


@pytest.mark.parametrize("suffix", ["gz", "xz", "zst", "zstd"])
def test_an_empty_compressed_file_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.jsonl.{suffix}"
    path.touch()
    with pytest.raises(DataError, match="it is empty, possibly after a failed download"):
        read(path)


def test_inputs_without_a_document_are_warned_of(tmp_path, capsys) -> None:
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in/a.jsonl", TEXTS)
    (tmp_path / "in/b.jsonl").touch()
    (tmp_path / "in/c.jsonl.gz").write_bytes(gzip.compress(b""))
    pyarrow.parquet.write_table(pyarrow.table({"text": [""]})[:0], tmp_path / "in/d.parquet")
    command = [f"a={tmp_path}/in", "--train-tokenizer", "257", "--output", str(tmp_path / "out")]
    assert main(command) == 0
    expected = f"warning: token set a: {tmp_path}/in/b.jsonl and 2 more inputs contain no document"
    assert expected in capsys.readouterr().err


def test_blank_documents_after_the_first_thousand_are_counted(tmp_path, capsys) -> None:
    write_jsonl(tmp_path / "a.jsonl", [*map(str, range(CHECKED + 1)), "", " ", "end"])
    write_jsonl(tmp_path / "b.jsonl", ["one", "two"])
    command = [f"web={tmp_path}/a.jsonl", f"b={tmp_path}/b.jsonl", "--train-tokenizer", "257"]
    assert main([*command, "--output", str(tmp_path / "out")]) == 0
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert f"token set web: skipped 2 blank documents, most of {tmp_path}/a.jsonl" in said


def test_blank_documents_before_an_interruption_are_not_counted_again(capsys) -> None:
    """The warning of the resumed preparation only covers the remaining documents."""
    portions: Any = [SimpleNamespace(inputs=["a.jsonl"])] * 2
    sets: Any = [SimpleNamespace(name="web", portions=portions)]
    progress, unused = Progress(position=Position(0, 5)), cast(Any, None)
    plan: Any = SimpleNamespace(sets=sets)
    pipeline = Pipeline(plan, unused, progress, unused, unused, unused, unused, unused)
    for _ in pipeline.portions():
        pipeline.blank["a.jsonl"] += 1
    skipped = "warning: token set web: skipped 1 blank document, most of a.jsonl"
    assert capsys.readouterr().err.splitlines() == [
        f"{skipped}, since the preparation was resumed", skipped
    ]  # fmt: skip


def test_blank_documents_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["", *TEXTS, " \n"])
    command = [f"a={tmp_path}/a.jsonl", "--train-tokenizer", "257", "--output", f"{tmp_path}/out"]
    assert main(command) == 0
    expected = f"2 of the first {len(TEXTS) + 2} documents are blank; blank documents are skipped"
    assert expected in capsys.readouterr().err


# --- files without text or rows -----------------------------------------------------------------

POINTED = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
FOREIGN: dict[str, tuple[bytes, str]] = {
    "a.txt": ("text\n".encode("utf-16"),
              r"must be UTF-8, got UTF-16; convert it: iconv -f UTF-16 -t UTF-8 .*a\.txt"),
    "b.jsonl": ('{"text": "a"}\n'.encode("utf-16-be"), "must be UTF-8, got UTF-16BE"),
    "c.jsonl.gz": (gzip.compress('{"text": "a"}\n'.encode("utf-16")), "must be UTF-8, got UTF-16;"),
    "d.txt": ("text\n".encode("utf-32"), "must be UTF-8, got UTF-32"),
    "e.jsonl.gz": (gzip.compress(gzip.compress(b"{}")), "gzip, compressed twice"),
    "f.txt": (b"PK\x03\x04rest", "a zip archive: unzip"),
    "g.jsonl": (b"PAR1rest", r"a Parquet file: mv .*g\.jsonl .*g\.parquet"),
    "h.json": (b'[\n  {"text": "a"},\n  {"text": "b"}\n]\n',
               r"a single list that .* jq -c '\.\[\]' "),
    "i.json": (b'[{"text": "a"}, {"text": "b"}]',
               r"rows must be objects, got a list; .*jq -c '\.\[\]' "),
    "k.json.gz": (gzip.compress(b'[\n{"text": "a"}]'),
                  "a single list that spans .* gzip -dc .* jq -c"),
    "l.txt": (POINTED, r"l\.txt is a Git LFS pointer, not the file itself: run git lfs pull"),
    "m.jsonl": (POINTED, "is a Git LFS pointer"),
    "n.parquet": (POINTED, "cannot read .* is a Git LFS pointer"),
    "o.jsonl": (b"<!DOCTYPE html>\n<html></html>\n",
                "the file is HTML or XML, possibly after a failed"),
    "p.parquet": (b"<html></html>", r"Parquet files start with PAR1, got b'<html></html>'"),
    "q.txt": (b"aa\0", r"byte 0x00 at offset 2; .* sed 's/\\x00//g' "),
    "r.md.gz": (gzip.compress(b"\0\0aa"), r"byte 0x00 at offset 0; .*gzip -dc .* \| sed "),
    "s.txt": ("é".encode("latin-1"), "0xe9 at offset 0 .* if it is Latin-1: iconv -f ISO-8859-1"),
    "t.jsonl": (b'{"text": "a"}\r{"text": "b"}\r', r"must end lines with .* convert it: sed "),
    "j.json": (b'{\n  "text": "a"\n}\n{\n  "text": "b"}\n', r"span several lines, .* jq -c '\.' "),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_text_is_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    content, message = FOREIGN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read(tmp_path / name)
    command = re.search(r"((?:jq|iconv|gzip|sed) [-'].*?)(?:; else.*)?$", str(error.value))
    if command is None or shutil.which(command[1].split()[0]) is None:
        return
    subprocess.run(command[1], shell=True, check=True)  # its advice works
    assert read(tmp_path) in (["text\n"], ["a"], ["a", "b"], ["aa"], ["é"])


@pytest.mark.parametrize("name", ["data.parquet", "data.jsonl", "data.txt"])
def test_a_pointer_in_a_dataset_of_a_local_folder_is_named(tmp_path: Path, name: str) -> None:
    write_jsonl(tmp_path / "part.jsonl", TEXTS)
    (tmp_path / name).write_bytes(POINTED)
    (source,) = find_inputs(f"hf:{tmp_path}").inputs
    with pytest.raises(DataError, match=rf"{name}: it is a Git LFS pointer"):
        texts([source])


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs zstd")
def test_a_long_window_is_named_with_what_to_do(tmp_path: Path) -> None:
    """For a frame of unknown size, the limit applies to the requested window, not to the
    content."""
    path = tmp_path / "rows.jsonl.zst"
    path.write_bytes(subprocess.run(["zstd", "-q", "--long=31"], input=lines(TEXTS),
                                    capture_output=True, check=True).stdout)  # fmt: skip
    with pytest.raises(DataError, match=r"its zstd window is over 128 MiB") as error:
        read(path)
    command = re.search(r"zstd -dc .* -o (\S+)$", str(error.value))
    assert command is not None
    subprocess.run(command[0], shell=True, check=True, stderr=subprocess.DEVNULL)
    assert read(Path(command[1])) == TEXTS


# --- a local copy of a corpus -------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["", "data"])
def test_parts_are_found_in_a_snapshot_of_the_hub(tmp_path: Path, layout: str) -> None:
    corpus = read_corpora()["olmo_mix"]
    (tmp_path / "README.md").write_text("The card.\n")
    for part in corpus.parts:
        folder = tmp_path / layout / part / "0"
        folder.mkdir(parents=True)
        (folder / "part.json.gz").write_bytes(gzip.compress(lines([part])))
    plan = corpus.set_plan(100_000, tmp_path)
    for portion, part in zip(plan.portions, corpus.parts, strict=True):
        assert texts(portion.inputs) == [part]
    shutil.rmtree(tmp_path / layout / "wiki")
    looked = f"move the files of wiki to one of {tmp_path}/wiki, {tmp_path}/data/wiki"
    with pytest.raises(DataError, match=f"a folder for the part wiki of corpus olmo_mix; {looked}"):
        corpus.set_plan(100_000, tmp_path)


def test_a_sample_is_not_taken_for_another(tmp_path: Path) -> None:
    for size in ("10BT", "100BT", "350BT"):
        (tmp_path / "sample" / size).mkdir(parents=True)
        write_jsonl(tmp_path / "sample" / size / "a.jsonl", [size])
    corpora = {
        "fineweb": "350BT",
        "fineweb_gpt2": "100BT",
        "fineweb_edu": "10BT",
        "fineweb_edu_100b": "100BT",
    }
    for name, size in corpora.items():
        portions = read_corpora()[name].set_plan(1000, tmp_path).portions
        assert texts(portions[0].inputs) == [size]


def test_a_corpus_of_one_part_is_read_from_its_files(tmp_path: Path) -> None:
    corpus = read_corpora()["c4"]
    (tmp_path / "README.md").write_text("The card.\n")
    (tmp_path / "realnewslike").mkdir()
    write_jsonl(tmp_path / "realnewslike/a.json", TEXTS)
    with pytest.raises(DataError, match="a folder for the part en of corpus c4"):
        corpus.set_plan(1000, tmp_path)
    for place in (tmp_path / "realnewslike", tmp_path / "realnewslike/a.json"):
        assert len(corpus.set_plan(1000, place).portions[0].inputs) == 1
    (tmp_path / "en").mkdir()
    (tmp_path / "en/b.json.gz").write_bytes(gzip.compress(json.dumps({"text": "b"}).encode()))
    (portion,) = corpus.set_plan(1000, tmp_path).portions
    assert texts(portion.inputs) == ["b"]
