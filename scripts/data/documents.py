"""Reading documents from text, JSON lines and Parquet files, compressed or not.

`datasets` reads Parquet, as it reads the hub. Text and JSON lines are read here, because it would
change them or lose some without an error: it makes line ends `\\n`, makes a date of a string that
looks like one, refuses fields that come late or change their type, counts lines anew in each block,
and takes a .zst file that was cut for a whole one.
"""

import glob
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pyarrow
from pyarrow import parquet

from scripts.data.hub import HubInput, parse_hub_input, row_documents
from scripts.data.text import first_line, row_text
from training.errors import DataError
from training.json_file import parse_json

NAMES: Final = re.compile(
    r".*(?P<kind>\.txt|\.md|\.jsonl)(\.gz|\.xz|\.zst)?|.*\.parquet", re.DOTALL
)
KNOWN = ".txt, .md and .jsonl (each also .gz, .xz or .zst), .parquet"
CHECKED: Final = 1000
"""Documents of each input that are checked before anything is made of them."""
_READ = 1 << 20


@dataclass(frozen=True)
class FileInput:
    """One file of documents, whose name matches `NAMES`."""

    path: Path
    text_key: str | None = None  # field that holds the text; None: that of the options

    @property
    def kind(self) -> str:
        """Its suffix before that of a compression."""
        found = NAMES.fullmatch(self.path.name)
        assert found is not None
        return found["kind"] or ".parquet"

    @property
    def has_keys(self) -> bool:
        """Whether its documents are fields of rows."""
        return self.kind in (".jsonl", ".parquet")

    def __str__(self) -> str:
        return str(self.path)


Input = FileInput | HubInput


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How files are split into documents."""

    text_key: str = "text"  # field that holds the text in inputs without a key of their own
    document_bytes: int = 2048  # size after which a text document ends at a blank line; 0: never


def find_inputs(source: str, text_key: str | None = None) -> list[Input]:
    """The inputs of a file, a folder, a glob pattern or `hf:NAME`, files in sorted order.

    A folder stands for all files below it with a known suffix; other files are ignored. Those
    whose documents are fields of rows have their text under `text_key` if it is given.

    Raises:
        DataError: nothing is found, a file has an unknown suffix, or none could have `text_key`.
    """
    inputs: list[Input] = (
        [parse_hub_input(source)] if source.startswith("hf:") else [*map(FileInput, _paths(source))]
    )
    if text_key is not None and not any(each.has_keys for each in inputs):
        raise DataError(f"key {text_key}: no file of {source} has keys")
    return [replace(each, text_key=text_key) if each.has_keys else each for each in inputs]


def _paths(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if path.is_dir():
        paths = [each for each in sorted(path.rglob("*")) if each.is_file() and _is_known(each)]
        if not paths:
            raise DataError(f"no file under {source} has a known suffix: {KNOWN}")
        return paths
    matches = [path] if path.is_file() else map(Path, glob.glob(str(path), recursive=True))
    paths = sorted(match for match in matches if match.is_file())
    if not paths:
        raise DataError(f"no file, folder or pattern {source}")
    for each in paths:
        if not _is_known(each):
            raise DataError(f"unknown suffix of {each}: known are {KNOWN}")
    return paths


def _is_known(path: Path) -> bool:
    return NAMES.fullmatch(path.name) is not None


def read_documents(inputs: Iterable[Input], options: ReadOptions) -> Generator[str, None, None]:
    """Yield the text of every document that is not blank, in order.

    Raises:
        DataError: an input is missing, unreadable, not UTF-8 or lacks the text field.
    """
    for each in inputs:
        with closing(_documents(each, options)) as documents:
            yield from (text for text in documents if not _is_blank(text))


def check_first_documents(inputs: Iterable[Input], options: ReadOptions) -> None:
    """Check the first `CHECKED` documents of every input, and that one of them all is not blank.

    Raises:
        DataError: as `read_documents`, or a file of rows has no text at all.
    """
    for each in inputs:
        number, blank = 0, True
        with closing(_documents(each, options)) as documents:
            for number, text in enumerate(documents, start=1):
                blank = blank and _is_blank(text)
                if not blank and number >= CHECKED:
                    break
        if blank and number and each.has_keys:
            raise DataError(
                f"{each}: {_key(each, options)!r} is blank in all {number:,} documents; "
                "name the key that holds the text, or leave this out"
            )


def _is_blank(text: str) -> bool:
    return not text or text.isspace()


def _key(each: Input, options: ReadOptions) -> str:
    return options.text_key if each.text_key is None else each.text_key


def _documents(each: Input, options: ReadOptions) -> Generator[str, None, None]:
    key = _key(each, options)
    if isinstance(each, HubInput):
        yield from each.documents(key)
    elif each.kind == ".parquet":
        file, columns = glob.escape(str(each.path)), _columns(each.path, key)
        with TemporaryDirectory() as cache:  # the user's need not exist
            yield from row_documents(
                each, key, path="parquet", split="train", data_files=file, columns=columns,
                batch_size=1024, cache_dir=cache,
            )  # fmt: skip
    elif each.kind == ".jsonl":
        yield from _json_documents(_lines(each.path), each.path, key)
    else:
        yield from _text_documents(_lines(each.path), each.path, options.document_bytes)


def _columns(path: Path, key: str) -> list[str] | None:
    """Return the column that is read of a Parquet file; None, all, where it is missing."""
    try:
        names = parquet.read_schema(path).names
    except (OSError, pyarrow.ArrowException):  # the reader says why
        return None
    return [key] if key in names else None


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a text file, decompressed, each with its line end.

    Raises:
        DataError: the file is missing, or its compressed content is corrupt or cut short.
    """
    try:
        with _opened(path) as lines:
            yield from lines
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"cannot read {path}: {first_line(error)}") from None


def _opened(path: Path) -> AbstractContextManager[Iterable[bytes]]:
    match path.suffix:
        case ".gz":
            return gzip.open(path)
        case ".xz":
            return lzma.open(path)
        case ".zst":
            return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), _READ)
    return path.open("rb")


def _text_documents(lines: Iterable[bytes], path: Path, document_bytes: int) -> Iterator[str]:
    offset = 0
    for block in split_text(lines, document_bytes):
        try:
            yield block.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not UTF-8: byte 0x{block[error.start]:02x} at offset "
                f"{offset + error.start} ({error.reason})"
            ) from None
        offset += len(block)


def split_text(lines: Iterable[bytes], document_bytes: int) -> Iterator[bytes]:
    """Split text into documents whose concatenation is the text, byte for byte.

    A document ends before the first line that follows a blank line once it has `document_bytes`,
    or, without blank lines, before any line once it has 16 times as many.
    0 makes the whole text one document.
    """
    parts: list[bytes] = []
    size, after_blank = 0, False
    for line in lines:
        blank = not line.strip()
        full = after_blank and not blank and size >= document_bytes
        if parts and document_bytes and (full or size >= 16 * document_bytes):
            yield b"".join(parts)
            parts, size = [], 0
        parts.append(line)
        size += len(line)
        after_blank = blank
    if parts:
        yield b"".join(parts)


def _json_documents(lines: Iterable[bytes], path: Path, key: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = parse_json(line)
        except ValueError as error:  # both JSONDecodeError and UnicodeDecodeError
            raise DataError(f"{where}: not JSON: {error}; mend or remove the line") from None
        yield row_text(row, where, key)
