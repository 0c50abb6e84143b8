"""Preparations that are killed and resumed, or divided among processes, equal the preparation by
one process byte for byte."""

import gzip
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tokenizers import Tokenizer

from scripts.data import (
    encoding,
    folder,
    hub,
    plan,
    preparation,
    repeats,
    resume_point,
    set_writer,
    shards,
    sources,
    text_tokenizer,
)
from scripts.data.sources import find_inputs
from scripts.prepare_data import chosen, main, parse
from tests.disk_calls import DiskCalls
from tests.run_results import hashes
from tests.text_files import TEXTS, lines, texts, write_byte_level_tokenizer, write_jsonl
from training.data import document_index
from training.data.hashes import file_sha256
from training.data.manifest import read_manifest
from training.errors import DataError

ROWS = 200


def rows(seed: int, count: int = ROWS) -> list[str]:
    """Return random documents."""
    chance = random.Random(seed)
    return [
        " ".join(chance.choices(TEXTS[3:], k=1) + [f"number {i}"] * chance.randrange(12))
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of files in several formats, one file, and a tokenizer."""
    home = tmp_path_factory.mktemp("inputs")
    (home / "web").mkdir()
    for i in range(5):
        write_jsonl(home / f"web/{i}.jsonl", rows(i, 40 + 20 * i))
    (home / "web/empty.jsonl").touch()
    (home / "web/z.txt.gz").write_bytes(gzip.compress("\n\n".join(rows(9)).encode()))
    pyarrow.parquet.write_table(pyarrow.table({"text": rows(10)}), home / "web/t.parquet")
    write_jsonl(home / "one.jsonl", rows(11))
    write_jsonl(home / "held_out.jsonl", rows(12, 50))
    (home / "dataset").mkdir()
    for i in range(3):
        (home / f"dataset/{i}.jsonl").write_bytes(lines(rows(20 + i, 80)))
    write_byte_level_tokenizer(home)
    return home


COMMANDS = {
    "trained": "web={}/web one={}/one.jsonl --train-tokenizer 300 --validation-fraction 0.1",
    "limited": "web={}/web one={}/one.jsonl --tokenizer {}/tokenizer.json --tokens 15000 "
    "--validation-fraction 1/7",
    "held out": "one={}/one.jsonl --validation one={}/held_out.jsonl --train-tokenizer 300",
    "hub": "a=hf:{}/dataset b={}/one.jsonl --tokenizer {}/tokenizer.json --validation-fraction 0.1",
}


def arguments(command: str, home: Path, out: Path, *more: str) -> list[str]:
    given = COMMANDS[command].replace("{}", str(home)).split()
    return [*given, "--workers", "1", "--output", str(out), *more]


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory):
    """A function that returns the hashes of the output that one process writes for a command."""
    home, known = tmp_path_factory.mktemp("whole"), {}

    def hashes_of(command: str) -> dict[str, str]:
        if command not in known:
            assert main(arguments(command, inputs, home / command)) == 0
            known[command] = hashes(home / command)
        return known[command]

    return hashes_of


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small chunks and blocks, and save after every chunk."""
    set_small_steps(monkeypatch.setattr)


def set_small_steps(set_=setattr) -> None:
    """Set the sizes used by `small_steps`."""
    set_(encoding, "_CHUNK_CHARACTERS", 3000)
    set_(resume_point, "SECONDS", 0.0)
    set_(sources, "BLOCK", 16)
    set_(shards, "BLOCK", 16)


@pytest.fixture(scope="module", autouse=True)
def end_clean_process():
    """End the process after the tests of this file."""
    yield
    clean_process().shutdown()


@cache
def clean_process() -> ProcessPoolExecutor:
    """Return a process to fork, without threads of other tests, because a fork of a process with
    threads may crash."""
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(1, context, import_module, ("tests.import_engine",))
    executor.submit(prepare_forks).result()
    return executor


def prepare_forks() -> None:
    """Set small steps, and import everything that a fork that reads from the hub would import."""
    set_small_steps()
    import_module("datasets")


KILLED_IN: dict[str, tuple[Any, str]] = {
    "add": (set_writer.DocumentFile, "add"),
    "sync": (set_writer.DocumentFile, "sync"),
    "save": (folder.AtomicFolder, "save"),
    "replace": (os, "replace"),
    "rename": (Path, "rename"),
    "delete": (folder, "delete"),
    "hashes": (set_writer, "write_block_hashes"),
}


def kill_in(place: str, call: int, options: list[str]) -> None:
    """Run the command, and kill it before the given call of a function, as in a power failure."""
    owner, name = KILLED_IN[place]
    original = getattr(owner, name)
    left = [call]

    def fatal(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, fatal)
    os._exit(main(options))


def killed(place: str, call: int, options: list[str]) -> bool:
    """Return whether the command was killed before its end."""
    exit_code = clean_process().submit(exit_code_of, place, call, options).result()
    assert exit_code in (0, -signal.SIGKILL)
    return exit_code != 0


def exit_code_of(place: str, call: int, options: list[str]) -> int | None:
    """Return the exit code of `kill_in` in a fork."""
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=kill_in, args=(place, call, options))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize("command", COMMANDS)
def test_killed_at_five_moments_it_goes_on(inputs, whole, tmp_path, command) -> None:
    expected, chance = whole(command), random.Random(command)
    options = arguments(command, inputs, tmp_path / "out")
    for _ in range(5):
        assert killed("add", chance.randrange(0, 40), options)
    assert main(options) == 0
    assert hashes(tmp_path / "out") == expected
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("place", [name for name in KILLED_IN if name != "add"])
@pytest.mark.parametrize("call", [0, 1, 3])
def test_killed_in_any_write_it_goes_on(inputs, whole, tmp_path, place, call) -> None:
    options = arguments("held out", inputs, tmp_path / "out")
    killed(place, call, options)
    assert main(options) == 0
    assert hashes(tmp_path / "out") == whole("held out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_it_goes_on_where_it_was(inputs, tmp_path, capsys) -> None:
    options = arguments("held out", inputs, tmp_path / "out")
    assert killed("add", 200, options)
    assert main(options) == 0
    said = re.search(r"resuming .* after (\d+) documents", capsys.readouterr().out)
    assert said is not None and 100 < int(said[1]) <= 200


def test_a_tokenizer_is_trained_once(inputs, whole, tmp_path, monkeypatch) -> None:
    """The tokenizer is on disk when progress is saved for the first time, before any document.
    Later, progress is saved after the documents that it counts."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    options, expected = arguments("trained", inputs, tmp_path / "out"), whole("trained")
    with monkeypatch.context() as patch:
        calls = DiskCalls(tmp_path, patch)
        patch.setattr(set_writer.DocumentFile, "add", interrupted)
        assert main(options) == 130
    lines = calls.lines()
    saved = next(i for i, line in enumerate(lines) if line.endswith("/progress.json"))
    assert f"wait {tmp_path}/out.preparing/tokenizer.json" in lines[:saved]
    monkeypatch.setattr(preparation, "train_tokenizer", interrupted)
    calls = DiskCalls(tmp_path, monkeypatch)
    assert main(options) == 0
    assert hashes(tmp_path / "out") == expected
    saves = "\n".join(calls.lines()).split("/progress.json\n")[2:-1]
    assert len(saves) > 10
    for name in ("web.train", "web.validation", "one.train", "one.validation"):
        for file in (f"out.preparing/{name}.bin", f"out.preparing.state/{name}.documents"):
            assert all(f"wait {tmp_path}/{file}\n" in save for save in saves), file


def test_other_options_begin_again(inputs, whole, tmp_path, capsys) -> None:
    options = arguments("trained", inputs, tmp_path / "out")
    assert killed("add", 200, [word.replace("0.1", "0.3") for word in options])
    assert main(options) == 0
    said = capsys.readouterr()
    assert "out.preparing was made from different inputs or options" in said.err
    assert "resuming" not in said.out and hashes(tmp_path / "out") == whole("trained")


def test_progress_that_cannot_be_continued_is_refused(inputs, whole, tmp_path, refusal) -> None:
    """The progress was written by another version, or one of its files is too short or was
    replaced."""
    options = arguments("held out", inputs, tmp_path / "out")
    state, bin_file = tmp_path / "out.preparing.state", tmp_path / "out.preparing/one.train.bin"

    def edit(change: dict[str, Any]) -> None:
        saved = json.loads((state / "progress.json").read_text())
        saved["progress"] = {**saved["progress"], **change}
        (state / "progress.json").write_text(json.dumps(saved))

    def replace(path: Path) -> None:
        path.write_bytes(path.read_bytes()[::-1])

    def retrain() -> None:
        path = tmp_path / "out.preparing/tokenizer.json"
        path.write_text(path.read_text() + " ")

    for damage in (lambda: edit({"new": 1}), lambda: edit({"written": []}),
                   lambda: bin_file.write_bytes(b""), lambda: replace(bin_file), retrain,
                   lambda: replace(state / "one.train.documents")):  # fmt: skip
        assert killed("add", 100, options)
        damage()
        said = refusal(main(options))
        assert said.endswith(f"; to start over, delete {tmp_path}/out.preparing\n")
        shutil.rmtree(tmp_path / "out.preparing")
    (state / "progress.json").write_text("[]")
    assert main(options) == 0
    assert hashes(tmp_path / "out") == whole("held out")


@pytest.mark.parametrize(
    ("command", "shards", "margin"),
    # The margin matters only under a limit.
    [*((command, 4, 1.1) for command in COMMANDS), ("limited", 10, 0.5)],
)
def test_shards_are_joined(inputs, whole, tmp_path, command, shards, margin, monkeypatch) -> None:
    """With a limit, ten shards contain part of each of nine inputs, and the join encodes the
    rest."""
    monkeypatch.setattr(preparation, "MARGIN", margin)
    options = arguments(command, inputs, tmp_path / "out")
    order = list(range(1, shards + 1))
    random.Random(shards).shuffle(order)
    for number in order:
        assert main([*options, "--shard", f"{number}/{shards}"]) == 0
    assert main(options) == 0
    assert hashes(tmp_path / "out") == whole(command)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("command", ["limited", "held out"])
def test_killed_shards_and_a_killed_join_go_on(inputs, whole, tmp_path, command, monkeypatch):
    """With a limit, the shards encode part of their shares, and the join encodes the rest."""
    monkeypatch.setattr(preparation, "MARGIN", 0.1)
    options, chance = arguments(command, inputs, tmp_path / "out"), random.Random(command)
    assert killed("add", 45, options)  # before there are shards, and within a block
    for number in (1, 2):
        shard = [*options, "--shard", f"{number}/2"]
        for _ in range(2):
            killed("add", chance.randrange(0, 40), shard)
        assert main(shard) == 0
    for _ in range(3):
        assert killed("add", chance.randrange(50, 70), options)
    killed("delete", 0, options)
    assert main(options) == 0
    assert hashes(tmp_path / "out") == whole(command)


def test_shards_encode_little_more_than_their_shares(inputs, tmp_path, capsys) -> None:
    """The shares end within documents, and the join encodes the rest."""
    options = [f"one={inputs}/one.jsonl", f"--tokenizer={inputs}/tokenizer.json", "--workers=1"]
    options += ["--tokens", "5000", "--output", str(tmp_path / "out")]
    for number in (1, 2, 3):
        assert main([*options, "--shard", f"{number}/3"]) == 0
    tokens = [int(each.replace(",", "")) for each in
              re.findall(r"documents, ([\d,]+) tokens", capsys.readouterr().out)]  # fmt: skip
    assert 5000 <= sum(tokens) <= 5000 * 1.3


def test_shards_of_a_lossy_tokenizer_are_joined_only_on_request(inputs, tmp_path, capsys) -> None:
    content = json.loads((inputs / "tokenizer.json").read_text())
    lossy = tmp_path / "lossy.json"
    lossy.write_text(json.dumps(content | {"normalizer": {"type": "Lowercase"}}))
    source = write_jsonl(tmp_path / "rows.jsonl", ["A Text", "a text"] * 20)
    out = tmp_path / "out"
    options = [f"a={source}", f"--tokenizer={lossy}", "--workers=1", f"--output={out}"]
    for number in (1, 2):
        assert main([*options, "--allow-lossy", f"--shard={number}/2"]) == 0
    capsys.readouterr()
    said = "the tokenizer changes the text of 50.0% of 40 decoded documents"
    assert main(options) == 2 and said in capsys.readouterr().err and not out.exists()
    assert main([*options, "--allow-lossy"]) == 0
    assert f"warning: token set a: {said}" in capsys.readouterr().err


def test_no_shard_is_left_out(inputs: Path, tmp_path: Path, refusal) -> None:
    out = tmp_path / "out"
    options = arguments("held out", inputs, out)
    assert main([*options, "--shard", "1/3"]) == 0
    assert main([*options, "--shard", "3/3"]) == 0
    said = refusal(main(options))
    assert "out.shards is missing 2-of-3: prepare the missing shards (--shard 2/3" in said
    assert not out.exists()
    assert main([*options[:1], *options[3:], "--shard", "2/3"]) == 0  # without its validation set
    assert "2-of-3 was made from different inputs or options" in refusal(main(options))
    assert main([*options, "--shard", "2/3"]) == 2
    assert main([*options, "--shard", "2/3", "--overwrite"]) == 0
    shard = tmp_path / "out.shards/2-of-3"
    for name in ("tokens.bin", "documents"):
        whole = (shard / name).read_bytes()
        (shard / name).write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        assert "2-of-3 is damaged or from an earlier version" in refusal(main(options))
        (shard / name).write_bytes(whole)
    (shard / "tokens.bin").write_bytes(b"")
    assert "2-of-3 is damaged: its files have the wrong sizes" in refusal(main(options))


def test_a_file_of_the_hub_that_fails_is_an_error(monkeypatch) -> None:
    class Stream:
        def shard(self, *, num_shards: int, index: int):
            assert (num_shards, index) == (2, 1)
            yield {"text": "0"}
            raise TimeoutError("the server sleeps")

    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: Stream())
    hub._opened.cache_clear()
    rows = hub.HubInput("someone/something", file=(1, 2)).rows()
    assert next(rows) == {"text": "0"}
    with pytest.raises(DataError, match="something::train, file 2 of 2: the server sleeps; check"):
        next(rows)
    hub._opened.cache_clear()


def test_the_index_is_megatrons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_index, "STEP", 7)
    for dtype, count in (("uint16", 1), ("int32", 7), ("uint16", 100)):
        lengths = np.random.default_rng(count).integers(1, 9, count)
        builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), np.dtype(dtype).type)
        for length in lengths:
            builder.add_document(np.zeros(length, dtype), [length])
        builder.finalize(str(tmp_path / "a.idx"))
        write = partial(document_index.write_index, tmp_path / "b.idx", count, dtype=dtype)
        write(lengths=lambda first, size, all_=lengths: all_[first : first + size])
        assert (tmp_path / "b.idx").read_bytes() == (tmp_path / "a.idx").read_bytes()


@pytest.mark.parametrize("option", ["--tokens=9000", "--document-bytes=9", "--eod=<x>",
                                    "--validation-fraction=0.2", "--text-key=other"])  # fmt: skip
def test_every_option_counts_in_the_fingerprint(inputs: Path, option: str) -> None:
    command = arguments("limited", inputs, Path("out"))
    keyed = [[word.replace("one=", f"one:{key}=") for word in command] for key in ("a", "b")]
    changed, name = [*command], option.partition("=")[0]
    if name in command:
        del changed[command.index(name) : command.index(name) + 2]
    changed.append(option)
    prints = [chosen(parse(each)).fingerprint() for each in (command, *keyed, changed, changed)]
    assert len({*prints}) == 4 and prints[3] == prints[4]


def test_every_file_of_a_tokenizer_counts_in_the_fingerprint(inputs: Path, tmp_path: Path) -> None:
    """All files of a tokenizer that are read or copied count."""
    command = arguments("limited", inputs, Path("out"))
    command[command.index("--tokenizer") + 1] = str(tmp_path)
    preparation, names = chosen(parse(command)), {*text_tokenizer._CONFIGS}
    names |= {text_tokenizer.TOKENIZER_FILE, *text_tokenizer.COMPANIONS}
    prints = [preparation.fingerprint()]
    for name in names:
        (tmp_path / name).write_text("{}")
        prints.append(preparation.fingerprint())
    assert len({*prints}) == len(names) + 1


def test_the_manifest_states_the_inputs_that_were_read(inputs: Path, tmp_path: Path) -> None:
    """For a set with a token limit, the manifest lists only the inputs up to the limit. The limit
    is reached with the last token of the first input, or one token later."""
    tokenizer = Tokenizer.from_file(str(inputs / "tokenizer.json"))
    documents = tokenizer.encode_batch(rows(0, 40))
    order = [file_sha256(inputs / f"web/{i}.jsonl") for i in range(5)]
    for read in (1, 2):
        limit = sum(len(each.ids) + 1 for each in documents) + read - 1
        options = [f"a={inputs}/web/[0-4].jsonl", f"--tokenizer={inputs}/tokenizer.json"]
        options += ["--workers=1", "--validation", f"a={inputs}/one.jsonl", f"--tokens={limit}"]
        assert main([*options, "--overwrite", "--output", str(tmp_path / "out")]) == 0
        sets = read_manifest(tmp_path / "out").sets
        assert sets["a.train"].inputs == order[:read]
        assert sets["a.validation"].inputs == [file_sha256(inputs / "one.jsonl")]
    (tmp_path / "out/manifest.json").rename(tmp_path / "old")
    content = json.loads((tmp_path / "old").read_text())
    for entry in content["sets"].values():
        del entry["inputs"]  # like earlier manifests
    (tmp_path / "out/manifest.json").write_text(json.dumps(content))
    assert read_manifest(tmp_path / "out").sets["a.train"].inputs == []


REPEATED = {
    "twice in a set": "a={}/one.jsonl a={}/copy.jsonl.gz a={}/same.jsonl",
    "in two sets": "a={}/one.jsonl b={}/same.jsonl",
    "on both sides": "a={}/one.jsonl --validation a={}/same.jsonl",
    "often and on both sides": "a={}/one.jsonl a={}/copy.jsonl.gz --validation a={}/same.jsonl",
    "on both sides of others": "a={}/one.jsonl b={}/held_out.jsonl --validation b={}/same.jsonl",
    "a folder and its file": "a={} b={}/one.jsonl",
}


@pytest.mark.parametrize("name", REPEATED)
def test_the_same_text_twice_is_warned_of(name, inputs, tmp_path, capsys) -> None:
    for file, source in (("one", "one"), ("same", "one"), ("held_out", "held_out")):
        (tmp_path / f"{file}.jsonl").write_bytes((inputs / f"{source}.jsonl").read_bytes())
    (tmp_path / "copy.jsonl.gz").write_bytes(gzip.compress(lines(rows(30, 20))))
    options = [f"--tokenizer={inputs}/tokenizer.json", "--workers=1", "--output",
               str(tmp_path / "out")]  # fmt: skip
    assert main([*REPEATED[name].replace("{}", str(tmp_path)).split(), *options]) == 0
    other = "[ab].validation" if "sides" in name else "[ab].train"
    said = rf"several inputs have the same content .1 case., for example a.train \(.*\) and {other}"
    assert re.search(f"warning: {said}", capsys.readouterr().err)


def test_documents_that_occur_twice_are_warned_of(inputs, tmp_path, capsys) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [f"text {i % 40}" for i in range(100)])
    write_jsonl(tmp_path / "held_out.jsonl", ["text 3", "text 39", "text 40"])
    options = [f"a={tmp_path}/rows.jsonl", "--validation", f"a={tmp_path}/held_out.jsonl"]
    options += [f"--tokenizer={inputs}/tokenizer.json", f"--output={tmp_path}/out"]
    assert main([*options, "--workers=1"]) == 0
    said = capsys.readouterr().err
    assert "warning: token set a.train: 60 of 100 documents repeat an earlier document\n" in said
    assert "warning: token set a.validation: 2 of 3 documents are also in a.train\n" in said


def test_a_sample_of_many_documents_keeps_all_copies(monkeypatch) -> None:
    monkeypatch.setattr(repeats, "MOST", 64)
    counts = repeats.Repeats()
    for i in range(3000):
        counts.add("a", b"%d" % (i % 1000))
    (said,) = counts.warnings(["a"])
    part, whole = re.match(r"token set a: about ([\d,]+) of ([\d,]+) documents", said).groups()  # type: ignore[union-attr]
    assert 3 * int(part.replace(",", "")) == 2 * int(whole.replace(",", ""))


def test_different_and_empty_inputs_are_not(inputs, tmp_path, capsys) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").touch()
    options = arguments("held out", inputs, tmp_path / "out", f"one={tmp_path}/*.jsonl")
    assert main(options) == 0
    assert "the same content" not in capsys.readouterr().err


def test_a_corpus_counts_by_its_tokens_and_parts(tmp_path: Path) -> None:
    """The fingerprint includes the number of tokens in each part and in the set."""
    for part in ("dclm", "starcoder", "pes2o", "arxiv", "open-web-math", "algebraic-stack", "wiki"):
        (tmp_path / part).mkdir()
        write_jsonl(tmp_path / part / "a.jsonl", [part])
    command = ["--corpus=olmo_mix", f"--from={tmp_path}", f"--tokenizer={tmp_path}", "--output=o"]
    prints = {
        chosen(parse([*command, *more])).fingerprint()
        for more in ([], ["--tokens=1B"], ["--tokens=1_000_000_001"], ["--tokens", "1e9"])
    }
    assert len(prints) == 3


@pytest.mark.parametrize("limit", [None, 400])
def test_parts_of_a_set_share_the_count_of_held_out_documents(limit, inputs, tmp_path, monkeypatch):
    """Both sets start at their first document, and the fourth of every seven documents is held out.
    Inputs are hashed before and after reading."""
    tokenizer = Tokenizer.from_file(str(inputs / "tokenizer.json"))
    portions, read = [], []
    for part in range(3):
        path = write_jsonl(tmp_path / f"{part}.jsonl", rows(part, 30))
        listing, source = find_inputs(str(path)).inputs, [str(path)]
        portions.append(plan.Portion(inputs=listing, source=source, tokens=limit))
        tokens = 0
        for text in rows(part, 30):
            if limit is None or tokens < limit:
                read.append(text)
                tokens += len(tokenizer.encode(text).ids) + 1
    sets = [plan.SetPlan(name, portions, Fraction(1, 7)) for name in "ab"]
    planned = plan.Preparation(sets=sets, tokenizer=inputs / "tokenizer.json")
    out = tmp_path / "out"
    hashed: list[Path] = []
    monkeypatch.setattr(plan, "file_sha256", lambda p: hashed.append(p) or file_sha256(p))
    identities = planned.identities()
    preparation.prepare(planned, out, identities=identities, workers=1, overwrite=False)
    counts = {hashed.count(each.path) for each in planned.inputs()}
    assert counts == {4}  # each file is an input of both sets
    for name in "ab":
        assert texts(out, f"{name}.validation") == read[3::7]
        rest = [text for i, text in enumerate(read) if i % 7 != 3]
        assert texts(out, f"{name}.train") == rest
