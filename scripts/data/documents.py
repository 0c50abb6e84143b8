"""Reading documents from text, JSON lines and Parquet files, compressed or not."""

import contextlib
import glob
import gzip
import io
import lzma
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from scripts.data.hub import HubInput, parse_hub_input
from scripts.data.text import checked_text, first_line
from training.errors import DataError
from training.json_file import parse_json

COMPRESSIONS = (".gz", ".xz", ".zst")
PLAIN = (".txt", ".md")
KINDS = (*PLAIN, ".jsonl", ".parquet")
KNOWN = ".txt, .md and .jsonl (each also .gz, .xz or .zst), .parquet"
CHECKED: Final = 1000
"""Documents of each input that are checked before anything is made of them."""
_READ = 1 << 20


@dataclass(frozen=True)
class FileInput:
    """One file of documents."""

    path: Path
    kind: str  # one of KINDS
    compression: str  # one of COMPRESSIONS or ""
    text_key: str | None = None  # field that holds the text; None: that of the options

    @property
    def has_keys(self) -> bool:
        """Whether its documents are fields of rows."""
        return self.kind not in PLAIN

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
    found = _found(source)
    if text_key is not None and not any(each.has_keys for each in found):
        raise DataError(f"key {text_key}: no file of {source} has keys")
    return [replace(each, text_key=text_key) if each.has_keys else each for each in found]


def _found(source: str) -> list[Input]:
    if source.startswith("hf:"):
        return [parse_hub_input(source)]
    path = Path(source).expanduser()
    if path.is_dir():
        found = [each for each in map(_file_input, sorted(path.rglob("*"))) if each is not None]
        if not found:
            raise DataError(f"no file under {source} has a known suffix: {KNOWN}")
        return list(found)
    if path.is_file():
        return [_required_file_input(path)]
    matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
    if not matches:
        raise DataError(f"no file, folder or pattern {source}")
    return [_required_file_input(match) for match in matches if match.is_file()]


def _file_input(path: Path) -> FileInput | None:
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    kind = Path(path.stem).suffix if compression else path.suffix
    if not path.is_file() or kind not in KINDS or (kind == ".parquet" and compression):
        return None
    return FileInput(path, kind, compression)


def _required_file_input(path: Path) -> FileInput:
    found = _file_input(path)
    if found is None:
        raise DataError(f"unknown suffix of {path}: known are {KNOWN}")
    return found


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
            unit = "line" if isinstance(each, FileInput) and each.kind == ".jsonl" else "row"
            raise DataError(
                f"{each}: {_key(each, options)!r} is blank in all {number:,} documents, "
                f"from {unit} 1 on; name the key that holds the text, or leave this out"
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
        yield from _parquet_documents(each.path, key)
    else:
        yield from _line_documents(each, key, options)


def _line_documents(file: FileInput, key: str, options: ReadOptions) -> Iterator[str]:
    with open_lines(file) as lines:
        if file.kind == ".jsonl":
            yield from _json_documents(lines, file.path, key)
        else:
            yield from _text_documents(lines, file.path, options.document_bytes)


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
            raise DataError(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict) or key not in row:
            keys = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}"
            raise DataError(f"{where}: no key {key!r}, found {keys or 'no keys'}")
        yield checked_text(row[key], where, key)


def _pyarrow(path: Path) -> Any:
    """The package that opens a file. Raises DataError if it is not installed."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise DataError(f"{path} needs pyarrow: pip install pyarrow") from None
    return pyarrow


def _parquet_documents(path: Path, key: str) -> Iterator[str]:
    pyarrow = _pyarrow(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if key not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise DataError(f"{path}: no column {key!r}, found {names}")
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=[key]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield checked_text(value, f"{path}, row {row}", key)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is not a readable Parquet file: {first_line(error)}") from None


@contextlib.contextmanager
def open_lines(file: FileInput) -> Iterator[Iterable[bytes]]:
    """Open the lines of a text file, decompressed, each with its line end.

    Raises:
        DataError: the file is missing, or its compressed content is corrupt or cut short.
    """
    errors = (OSError, EOFError, zlib.error, lzma.LZMAError)
    try:
        with open(file.path, "rb") as raw:
            yield _decompressed(raw, file)
    except errors as error:
        raise DataError(f"cannot read {file.path}: {first_line(error)}") from None


def _decompressed(raw: BinaryIO, file: FileInput) -> Iterable[bytes]:
    if file.compression == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if file.compression == ".xz":
        return lzma.LZMAFile(raw)
    if file.compression == ".zst":
        return io.BufferedReader(_pyarrow(file.path).CompressedInputStream(raw, "zstd"), _READ)
    return raw
