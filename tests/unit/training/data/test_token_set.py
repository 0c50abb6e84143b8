"""Token sets and manifests: reading, rejection of corrupt files, and detection of damaged tokens at
startup or on first use."""

import hashlib
import math
import re
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from itertools import islice
from os import truncate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts import prepare_data
from scripts.verify import main as verified
from tests.paths import ROOT
from tests.token_files import write_manifest, write_stream
from tests.unit.training.data.conftest import sampler
from training.data import hashes, token_set
from training.data.batches import training_loader, without_worker_traces
from training.data.hashes import BLOCK
from training.data.manifest import read_manifest
from training.data.order import TrainingData
from training.data.token_set import TokenSet, check_vocabulary
from training.errors import DataError, InputError

SEQUENCE = 32


def patch(path: Path, offset: int, content: bytes) -> None:
    """Overwrite bytes of a file, and nothing else."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("count", [9, 16, 17, 100])
def test_windows_overlap_by_one_token_and_cut_the_stream(tmp_path, count, dtype) -> None:
    tokens = np.arange(count, dtype=dtype)[::-1].copy()
    found = TokenSet("set", write_stream(tmp_path / "set", tokens), 8)
    expected = [tokens[i : i + 9].tolist() for i in range(0, count - 8, 8)]
    assert [found.window(i).tolist() for i in range(len(found))] == expected
    assert found.window(0).dtype == np.int64 and found.tokens == count


@pytest.mark.parametrize("whole", [1 << 28, 1000])
def test_the_digest_is_the_same_for_ever(tmp_path, monkeypatch, whole) -> None:
    """Checkpoints contain the digest, which covers the sizes and the contents of the index and the
    tokens. In a large token file, it covers 64 evenly spaced blocks."""
    monkeypatch.setattr(token_set, "WHOLE", whole)
    tokens = np.random.default_rng(0).integers(0, 500, 300_001, dtype=np.uint16)
    prefix = write_stream(tmp_path / "set", tokens)
    content, index = tokens.tobytes(), Path(f"{prefix}.idx").read_bytes()
    places = [(len(content) - 4096) * i // 63 for i in range(64)]
    read = b"".join(content[i : i + 4096] for i in places) if whole == 1000 else content
    sizes = [struct.pack("<Q", len(each)) for each in (index, content)]
    expected = hashlib.sha256(sizes[0] + index + sizes[1] + read).hexdigest()
    assert TokenSet("set", prefix, 8).digest == expected


def test_too_few_tokens_for_a_window_says_how_many_are_needed(tmp_path: Path) -> None:
    prefix = write_stream(tmp_path / "set", np.arange(8, dtype=np.uint16))
    with pytest.raises(
        DataError, match="must contain at least 9 tokens for sequence_length 8, got 8"
    ):
        TokenSet("set", prefix, 8)


@pytest.mark.parametrize("wrong", ["set.bin", "set.idx", "st", ""])
def test_the_sets_of_the_folder_are_named_for_a_wrong_prefix(wrong: str, tmp_path: Path) -> None:
    prefix = write_stream(tmp_path / "set", np.arange(100, dtype=np.uint16))
    rule = f"does not exist; path must be a prefix without .bin and .idx, such as {prefix}$"
    with pytest.raises(DataError, match=rule):
        TokenSet("set", tmp_path / wrong, 8)


@pytest.mark.parametrize("kind", ["bin", "npy"])
def test_token_files_without_an_index_are_read_after_the_script_of_the_page(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokens = np.array([7, 8, 9, 50256, 1, 2, 50256, 5], dtype=np.uint16)
    path = tmp_path / f"train.{kind}"
    tokens.tofile(path) if kind == "bin" else np.save(path, tokens)
    for wrong in ("train", path.name):
        with pytest.raises(DataError, match="does not exist; .*under 'Token files without an ind"):
            TokenSet("set", wrong, 3)
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    if kind == "npy":
        script = re.sub(r"tokens = .*# for .npy: (.*)", r"tokens = \1", script)
    exec(compile(script, "docs/data.md", "exec"), {})
    indexed = TokenSet("set", "indexed", 3)
    assert indexed.documents() == 3
    np.testing.assert_array_equal(indexed.read(0, len(tokens)), tokens)


CORRUPTIONS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "no idx": (lambda i, b: i.unlink(), r"set\.idx does not exist"),
    "no bin": (lambda i, b: b.unlink(), r"set\.bin does not exist"),
    "empty idx": (lambda i, b: truncate(i, 0), "must start with a Megatron index header"),
    "other file": (lambda i, b: patch(i, 0, b"{"), "must start with a Megatron index header"),
    "version": (lambda i, b: patch(i, 9, struct.pack("<Q", 7)), "version must be 1, got 7"),
    "dtype": (lambda i, b: patch(i, 17, b"\x06"), "dtype code must denote an integer type, got 6"),
    "cut idx": (lambda i, b: truncate(i, 60), "the file must have 102 bytes, got 60"),
    "long count": (lambda i, b: patch(i, 18, b"\xff" * 8), "bytes, got 102"),
    "empty bin": (lambda i, b: truncate(b, 0), "must contain tokens, got none"),
    "cut bin": (
        lambda i, b: truncate(b, 100),
        "must have 200 bytes according to the index, got 100",
    ),
    "odd bin": (lambda i, b: truncate(b, 199), "index, got 199"),
    "long bin": (lambda i, b: b.write_bytes(b"\x00" * 202), "index, got 202"),
    "length": (lambda i, b: patch(i, 34, struct.pack("<i", 5)), "are not contiguous"),
    "negative": (lambda i, b: patch(i, 42, struct.pack("<i", -1)), "are not contiguous"),
    "pointer": (lambda i, b: patch(i, 46, struct.pack("<q", 2)), "are not contiguous"),
    "documents": (lambda i, b: patch(i, 94, struct.pack("<q", 9)), "sequence 3, got sequence 9"),
    "few documents": (
        lambda i, b: patch(i, 94, struct.pack("<q", 2)),
        "sequence 3, got sequence 2",
    ),
}


@pytest.mark.parametrize("case", CORRUPTIONS)
def test_corrupt_index_is_one_clear_error(tmp_path: Path, case: str) -> None:
    write_stream(tmp_path / "set", np.arange(100, dtype=np.uint16))
    corrupt, message = CORRUPTIONS[case]
    corrupt(tmp_path / "set.idx", tmp_path / "set.bin")
    with pytest.raises(DataError, match=message) as caught:
        TokenSet("set", tmp_path / "set", 8)
    assert "set set" in str(caught.value) and isinstance(caught.value, InputError)


def test_entropy_and_largest_token_agree_with_counting(prefixes: dict[str, Path]) -> None:
    for name, prefix in prefixes.items():
        tokens = np.fromfile(f"{prefix}.bin", dtype=np.uint16).tolist()
        shares = [n / len(tokens) for n in Counter(tokens).values()]
        found = TokenSet(name, prefix, 8)
        # Two sums of a few hundred terms of order 1, equal up to float64 rounding.
        entropy = math.fsum(-p * math.log(p) for p in shares)
        assert found.unigram_entropy() == pytest.approx(entropy, rel=1e-12)
        assert found.token_range == (0, max(tokens))


def test_negative_token_is_an_error(tmp_path: Path) -> None:
    prefix = write_stream(tmp_path / "set", np.array([1, 2, -3] * 9, dtype=np.int32))
    with pytest.raises(DataError, match=r"got -3 \("):
        TokenSet("set", prefix, 8, vocab_size=9).window(0)


def test_vocabulary_check_names_set_id_and_vocabulary(prefixes: dict[str, Path]) -> None:
    sets = [TokenSet(name, prefix, 8) for name, prefix in prefixes.items()]
    largest = max(each.token_range[1] for each in sets)
    check_vocabulary(sets, largest + 1)
    with pytest.raises(
        DataError, match=rf"must be in \[0, vocab_size = {largest}\), got {largest}"
    ):
        check_vocabulary(sets, largest)


def test_manifest_beside_the_set_must_agree_with_it(prefixes, tmp_path) -> None:
    write_manifest(tmp_path, max_token=12345)
    assert TokenSet("a", prefixes["a"], 8).token_range == (0, 12345)  # taken, not scanned
    write_manifest(tmp_path, tokens=999)
    with pytest.raises(
        DataError, match="contains 1000 tokens, but the manifest in its folder lists 999"
    ):
        _ = TokenSet("a", prefixes["a"], 8).token_range


MANIFEST = """{"format": 1, "sets": {}, "tokenizer": {"file": "t", "sha256": "", "vocab_size": 1,
    "eod_id": 0, "byte_level": true}, "files": %s}"""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "manifest.json does not exist: .* must be a folder written by scripts"),
        ("{", "cannot read .*manifest.json"),
        ('{"format": 2}', "format of .* must be 1, got 2"),
        ('{"format": 1, "sets": {}}', "manifest.json: tokenizer.file is required"),
        (MANIFEST % '{"a.bin": "1"}', "manifest.json: files.a.bin must be an integer, got '1'"),
    ],
)
def test_unusable_manifest_is_one_clear_error(tmp_path, content, message) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=message):
        read_manifest(tmp_path)


# --- damaged tokens -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def preparation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a prepared set `tokens.train`, which consists of several blocks."""
    place = tmp_path_factory.mktemp("preparation")
    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + letter) for letter in rng.integers(0, 26, 5)) for _ in range(500)]
    text = "\n\n".join(" ".join(rng.choice(words, 400)) for _ in range(100))
    (place / "words.txt").write_text(text)
    command = [f"tokens={place / 'words.txt'}", "--train-tokenizer", "300", "--output"]
    assert prepare_data.main([*command, str(place / "prepared"), "--workers", "1"]) == 0
    assert (place / "prepared" / "tokens.train.bin").stat().st_size > 4 * BLOCK
    return place / "prepared"


@pytest.fixture
def prepared(preparation: Path, tmp_path: Path) -> Path:
    """A copy of the folder `preparation`."""
    return Path(shutil.copytree(preparation, tmp_path / "prepared"))


def opened(folder: Path, verify: str = "sample", **options: Any) -> TokenSet:
    """Open the prepared set in a folder."""
    options["verify"] = verify
    return TokenSet("tokens", folder / "tokens.train", SEQUENCE, **options)


def test_zeros_of_the_right_size_are_refused(prepared: Path) -> None:
    path = prepared / "tokens.train.bin"
    path.write_bytes(bytes(path.stat().st_size))
    for verify in ("sample", "full"):
        with pytest.raises(DataError, match="tokens.train.bin is corrupt: bytes 0 to 65536"):
            opened(prepared, verify)
    assert opened(prepared, "none").window(0).sum() == 0


def test_a_flipped_bit_is_noticed_when_it_is_first_read(prepared, monkeypatch) -> None:
    monkeypatch.setattr("training.data.token_set.SPREAD", 2)  # first and last block
    path = prepared / "tokens.train.bin"
    place = BLOCK  # also of the last token of the previous window
    patch(path, place, bytes([path.read_bytes()[place] ^ 1]))
    tokens = opened(prepared)
    tokens.window(0)
    bad = place // 2 // SEQUENCE - 1
    with pytest.raises(DataError, match="bytes 65536 to 131072 do not match their stored hash"):
        tokens.window(bad)
    with pytest.raises(DataError, match="corrupt"):
        opened(prepared, "full")
    opened(prepared, "full", share=(0, 2))  # the other rank's blocks include the second
    with pytest.raises(DataError, match="corrupt"):
        opened(prepared, "full", share=(1, 2))
    assert len(opened(prepared, "none").window(bad)) == SEQUENCE + 1


def test_each_block_is_hashed_once(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = opened(prepared)
    calls = []
    monkeypatch.setattr(hashes, "block_hash", lambda content: calls.append(content))
    for index in range(len(tokens)):
        tokens.window(index)
    assert calls == []  # the set has fewer blocks than are compared at the start


def test_no_block_is_read_beyond_the_bytes_that_are_asked_for(tmp_path: Path) -> None:
    prefix = write_stream(tmp_path / "set", np.zeros(BLOCK // 2, np.uint16))
    hashes.write_block_hashes(prefix)
    zeros = hashes.BlockHashes(str(prefix), np.zeros(BLOCK, np.uint8))
    zeros.check_bytes(0, BLOCK)


def test_a_file_that_is_cut_while_it_is_read_is_an_error(prepared: Path) -> None:
    tokens = opened(prepared, "none")
    last = tokens.window(len(tokens) - 1)
    assert len(last) == SEQUENCE + 1
    truncate(prepared / "tokens.train.bin", 1000)
    with pytest.raises(DataError, match="tokens.train.bin was truncated to 1000 bytes"):
        tokens.window(len(tokens) - 1)


@pytest.mark.parametrize("suffix", ["idx", "blocks"])
def test_index_and_hashes_are_compared_themselves(prepared: Path, suffix: str) -> None:
    path = prepared / f"tokens.train.{suffix}"
    content = path.read_bytes()
    patch(path, len(content) - 3, bytes([content[-3] ^ 1]))
    with pytest.raises(DataError, match=rf"tokens.train.{suffix} is corrupt"):
        opened(prepared)


def test_a_set_without_hashes_of_blocks_is_read_whole_if_it_is_small(prepared, monkeypatch) -> None:
    """Earlier versions created such sets."""
    manifest = prepared / "manifest.json"
    blocks = read_manifest(prepared).sets["tokens.train"].sha256["blocks"]
    text = manifest.read_text()
    before = text.replace(f',\n        "blocks": "{blocks}"', "")
    assert before != text
    manifest.write_text(before)
    opened(prepared)
    patch(prepared / "tokens.train.bin", 70_000, b"\0\0\1\0")
    with pytest.raises(
        DataError, match="the file's sha256 differs from the sha256 in manifest.json"
    ):
        opened(prepared)
    monkeypatch.setattr("training.data.token_set.WHOLE", 100)
    opened(prepared)
    with pytest.raises(
        DataError, match="the file's sha256 differs from the sha256 in manifest.json"
    ):
        opened(prepared, "full")


def test_a_full_verification_needs_hashes(tmp_path: Path) -> None:
    prefix = write_stream(tmp_path / "set", np.arange(100, dtype=np.uint16))
    with pytest.raises(
        DataError, match="data.verify=full requires hashes, but no manifest.json in the folder of"
    ):
        TokenSet("set", prefix, 8, verify="full")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_id_beyond_the_vocabulary_is_an_error_before_the_model_sees_it(tmp_path, workers):
    """Test a set without an entry in the manifest, also in a prefetching process."""
    tokens = np.arange(100, dtype=np.uint16) % 50
    tokens[40] = 77
    prefix = write_stream(tmp_path / "set", tokens)
    data = TrainingData([(TokenSet("set", prefix, 8, vocab_size=50), 1.0)], seed=0)
    loader = training_loader(data, sampler(global_batch=1, micro_batch=1), workers=workers)
    with pytest.raises(DataError) as caught:
        list(islice(without_worker_traces(loader), 12))
    assert str(caught.value).startswith(
        f"token set set ({prefix}): token ids must be in [0, vocab_size"
    )
    assert "= 50), got 77 (1 invalid ids in tokens " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: patch(folder / "tokens.train.bin", 9, b"\7"), "bytes 0 to 65536"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json must have"),
        (lambda folder: (folder / "tokens.train.idx").unlink(), "does not exist"),
        (lambda folder: patch(folder / "tokens.train.blocks", 0, b"7"), "blocks is corrupt"),
    ],
)
def test_verify_names_what_is_damaged(prepared, damage, said, capsys):
    assert verified([str(prepared)]) == 0
    assert capsys.readouterr().out.rstrip().endswith("good")
    damage(prepared)
    assert verified([str(prepared)]) == 1 and said in capsys.readouterr().out


@pytest.mark.parametrize("place", [0, 500, -1])
def test_a_negative_id_is_found_at_the_start(tmp_path: Path, place: int) -> None:
    """The scan of a set without a manifest finds the id before its window is read."""
    tokens = np.arange(1000, dtype=np.int32) % 50
    tokens[place] = -7
    token_set = TokenSet("a", write_stream(tmp_path / "a", tokens), 8)
    with pytest.raises(DataError, match=r"token ids must be in \[0, vocab_size = 50\), got -7"):
        check_vocabulary([token_set], 50)
