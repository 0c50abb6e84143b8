"""Token sets and manifests: what they read, and that corrupt files are refused."""

import math
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.token_files import write_manifest, write_stream
from training.data.manifest import read_manifest
from training.data.token_set import TokenSet, check_vocabulary
from training.errors import DataError, InputError


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("count", [9, 16, 17, 100])
def test_windows_overlap_by_one_token_and_cut_the_stream(
    tmp_path: Path, count: int, dtype: type
) -> None:
    tokens = np.arange(count, dtype=dtype)[::-1].copy()
    found = TokenSet("set", write_stream(tmp_path / "set", tokens), 8)
    expected = [tokens[i : i + 9].tolist() for i in range(0, count - 8, 8)]
    assert [found.window(i).tolist() for i in range(len(found))] == expected
    assert found.window(0).dtype == np.int64
    assert found.tokens == count


def test_too_few_tokens_for_a_window_says_how_many_are_needed(tmp_path: Path) -> None:
    prefix = write_stream(tmp_path / "set", np.arange(8, dtype=np.uint16))
    with pytest.raises(DataError, match="has 8 tokens.*sequence_length 8 needs 9"):
        TokenSet("set", prefix, 8)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def patch(path: Path, offset: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(data)


CORRUPTIONS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "no idx": (lambda idx, bin_: idx.unlink(), r"no file .*set\.idx"),
    "no bin": (lambda idx, bin_: bin_.unlink(), r"no file .*set\.bin"),
    "empty idx": (lambda idx, bin_: cut(idx, 0), "does not begin with the header"),
    "other file": (lambda idx, bin_: patch(idx, 0, b"{"), "does not begin with the header"),
    "version": (lambda idx, bin_: patch(idx, 9, struct.pack("<Q", 7)), "version must be 1, got 7"),
    "dtype": (lambda idx, bin_: patch(idx, 17, b"\x06"), "dtype code 6 is not an integer type"),
    "cut idx": (lambda idx, bin_: cut(idx, 60), "need 102 bytes, the file has 60"),
    "long count": (lambda idx, bin_: patch(idx, 18, b"\xff" * 8), "the file has 102"),
    "empty bin": (lambda idx, bin_: cut(bin_, 0), "is empty"),
    "cut bin": (lambda idx, bin_: cut(bin_, 100), "has 100 bytes, but its index describes 200"),
    "odd bin": (lambda idx, bin_: cut(bin_, 199), "has 199 bytes"),
    "long bin": (lambda idx, bin_: bin_.write_bytes(b"\x00" * 202), "has 202 bytes"),
    "length": (lambda idx, bin_: patch(idx, 34, struct.pack("<i", 5)), "do not follow each other"),
    "negative": (lambda idx, bin_: patch(idx, 42, struct.pack("<i", -1)), "do not follow"),
    "pointer": (lambda idx, bin_: patch(idx, 46, struct.pack("<q", 2)), "do not follow"),
    "documents": (lambda idx, bin_: patch(idx, 94, struct.pack("<q", 9)), "end at sequence 9 of 3"),
    "few documents": (lambda idx, bin_: patch(idx, 94, struct.pack("<q", 2)), "end at sequence 2"),
}


@pytest.mark.parametrize("case", CORRUPTIONS)
def test_corrupt_index_is_one_clear_error(tmp_path: Path, case: str) -> None:
    write_stream(tmp_path / "set", np.arange(100, dtype=np.uint16))
    corrupt, message = CORRUPTIONS[case]
    corrupt(tmp_path / "set.idx", tmp_path / "set.bin")
    with pytest.raises(DataError, match=message) as caught:
        TokenSet("set", tmp_path / "set", 8)
    assert "set set" in str(caught.value)
    assert isinstance(caught.value, InputError)


def test_entropy_and_largest_token_agree_with_counting(prefixes: dict[str, Path]) -> None:
    for name, prefix in prefixes.items():
        tokens = np.fromfile(f"{prefix}.bin", dtype=np.uint16).tolist()
        shares = [n / len(tokens) for n in Counter(tokens).values()]
        found = TokenSet(name, prefix, 8)
        # Two sums of a few hundred terms of order 1: equal up to float64 rounding.
        assert found.unigram_entropy() == pytest.approx(
            math.fsum(-p * math.log(p) for p in shares), rel=1e-12
        )
        assert found.max_token() == max(tokens)


def test_negative_token_is_an_error(tmp_path: Path) -> None:
    prefix = write_stream(tmp_path / "set", np.array([1, 2, -3] * 9, dtype=np.int32))
    with pytest.raises(DataError, match="holds token id -3"):
        TokenSet("set", prefix, 8).unigram_entropy()


def test_vocabulary_check_names_set_id_and_vocabulary(prefixes: dict[str, Path]) -> None:
    sets = [TokenSet(name, prefix, 8) for name, prefix in prefixes.items()]
    largest = max(each.max_token() for each in sets)
    check_vocabulary(sets, largest + 1)
    with pytest.raises(DataError, match=rf"holds token id {largest}, but vocab_size is {largest}"):
        check_vocabulary(sets, largest)


def test_manifest_beside_the_set_must_agree_with_it(
    prefixes: dict[str, Path], tmp_path: Path
) -> None:
    write_manifest(tmp_path, max_token=12345)
    assert TokenSet("a", prefixes["a"], 8).max_token() == 12345  # taken, not scanned
    write_manifest(tmp_path, tokens=999)
    with pytest.raises(DataError, match="has 1000 tokens, but the manifest beside it says 999"):
        TokenSet("a", prefixes["a"], 8).max_token()


MANIFEST = """{"format": 1, "sets": {}, "tokenizer": {"file": "t", "sha256": "", "vocab_size": 1,
    "eod_id": 0, "byte_level": true}, "files": %s}"""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no .*manifest.json: is .* a folder made by"),
        ("{", "cannot read .*manifest.json"),
        ('{"format": 2}', "format of .* must be 1, got 2"),
        ('{"format": 1, "sets": {}}', "manifest.json: tokenizer.file is required"),
        (MANIFEST % '{"a.bin": "1"}', "manifest.json: files.a.bin must be an integer, got '1'"),
    ],
)
def test_unusable_manifest_is_one_clear_error(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=message):
        read_manifest(tmp_path)
