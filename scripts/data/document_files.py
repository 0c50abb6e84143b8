"""Read documents from text, JSON lines and Parquet files, compressed or not.

Parquet files are read with pyarrow, and hub datasets with `datasets`. Text and JSON lines are
parsed here, because `datasets` silently alters or drops text: it converts line endings to `\\n` and
date-like strings to dates, and reads truncated .zst files without an error. `datasets` also rejects
fields that first appear late or change type, and restarts line numbers in every block.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow
from pyarrow.parquet import ParquetFile

from parallel.error_text import first_line
from scripts.command import counted
from scripts.data.compression import read_lines, rewritten
from scripts.data.hub import HubInput, Row
from scripts.data.sources import START, WHOLE, FileInput, Input, Position, Shard
from training.errors import DataError
from training.json_file import UNFETCHED, is_pointer, parse_json

CHECKED: Final = 1000
"""Number of documents per input that are checked before the preparation starts."""
PARQUET_ROWS: Final = 1024
"""Number of Parquet rows held in memory at a time."""
NO_ZEROS: Final = r"sed 's/\x00//g'"


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options for splitting files into documents."""

    text_key: str = "text"  # field that contains the text, for inputs that do not set text_key
    document_bytes: int = 2048  # end a document at a blank line after this many bytes; 0: never


def read_documents(
    inputs: Sequence[Input],
    options: ReadOptions,
    start: Position = START,
    shard: Shard = WHOLE,
    blank: Counter[str] | None = None,
) -> Generator[tuple[Position, str], None, None]:
    """Yield the text of every non-blank document, in order, with the position right after it.

    Args:
        inputs: the inputs to read, up to the last one.
        options: options for splitting files into documents.
        start: position to resume from.
        shard: the shard whose documents to yield.
        blank: updated with the number of blank documents skipped, by input name.

    Raises:
        DataError: an input is missing, unreadable or not UTF-8, or lacks the text field.
    """
    for number in range(start.input, len(inputs)):
        if not shard.owns(number, None):
            continue
        first = start.document if number == start.input else 0
        index = 0
        with closing(_documents(inputs[number], options)) as documents:
            for text in documents:
                remains = index >= first and shard.owns(number, index)
                if _is_blank(text):
                    if blank is not None:
                        blank[str(inputs[number])] += remains
                    continue
                if remains:
                    yield Position(number, index + 1), text
                index += 1


def check_first_documents(
    inputs: Iterable[Input], options: ReadOptions
) -> list[tuple[int, int, int]]:
    """Check the first `CHECKED` documents of every input. For each input, return the numbers of
    checked documents, of blank documents and of documents with the replacement character U+FFFD.

    If the first documents are all blank, the check continues up to the first non-blank one.

    Raises:
        DataError: as in `read_documents`, or if all rows of an input are blank.
    """
    counts = []
    for each in inputs:
        number, blank, replaced = 0, 0, 0
        with closing(_documents(each, options)) as documents:
            for number, text in enumerate(documents, start=1):
                blank += _is_blank(text)
                replaced += "\ufffd" in text
                if blank < number and number >= CHECKED:
                    break
        if blank == number > 0 and each.has_keys:
            raise DataError(
                f"{each}: {_key(each, options)!r} is blank in all "
                f"{counted(number, 'document')}; set a different text key, or omit the file"
            )
        counts.append((number, blank, replaced))
    return counts


def _is_blank(text: str) -> bool:
    return not text or text.isspace()


def _key(each: Input, options: ReadOptions) -> str:
    return options.text_key if each.text_key is None else each.text_key


def _documents(each: Input, options: ReadOptions) -> Generator[str, None, None]:
    if isinstance(each, FileInput) and not each.has_keys:
        yield from _text_documents(read_lines(each.path), each.path, options.document_bytes)
        return
    key = _key(each, options)
    for where, row in rows_of(each, key):
        yield row_text(row, where, key)


def rows_of(each: Input, key: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield each row of a JSON lines, Parquet or hub input, with its location for error messages.

    If `key` is a column of a Parquet file, only this column is read. Raises DataError if the input
    cannot be read.
    """
    if isinstance(each, FileInput) and each.kind == ".jsonl":
        yield from _json_rows(read_lines(each.path), each.path)
        return
    rows = each.rows() if isinstance(each, HubInput) else _parquet_rows(each.path, key)
    for number, row in enumerate(rows, start=1):
        yield f"{each}, row {number}", row


def _parquet_rows(path: Path, key: str | None) -> Iterator[Row]:
    if is_pointer(path):
        raise DataError(f"cannot read {path}: it is {UNFETCHED}")
    with path.open("rb") as opened:
        head = opened.read(16)
    if not head.startswith(b"PAR1"):
        raise DataError(
            f"cannot read {path}: Parquet files start with PAR1, got {head!r}; download it again"
        )
    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            if key is not None and names.count(key) > 1:
                raise DataError(f"{path} must have one column {key!r}, got {names.count(key)}")
            columns = [key] if key in names else None
            for batch in file.iter_batches(PARQUET_ROWS, columns=columns):
                yield from batch.to_pylist()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"cannot read {path}: {first_line(error)}") from None


def _text_documents(lines: Iterable[bytes], path: Path, document_bytes: int) -> Iterator[str]:
    offset = 0
    for block in split_text(lines, document_bytes):
        try:
            text = block.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not UTF-8: byte 0x{block[error.start]:02x} at offset "
                f"{offset + error.start} ({error.reason}); if it is Latin-1: "
                f"{_as_text(path, 'iconv -f ISO-8859-1 -t UTF-8')}"
            ) from None
        if (zero := block.find(0)) >= 0:
            raise DataError(
                f"{path} is binary or damaged: byte 0x00 at offset {offset + zero}; to strip these "
                f"bytes: {_as_text(path, NO_ZEROS)}"
            )
        # Strip the byte order mark.
        yield text if offset else text.removeprefix("\ufeff")
        offset += len(block)


def _as_text(path: Path, program: str) -> str:
    return rewritten(path, program, f"utf8{'.md' if '.md' in path.suffixes else '.txt'}")


def split_text(lines: Iterable[bytes], document_bytes: int) -> Iterator[bytes]:
    """Split text into documents that concatenate to the same text, byte for byte.

    Once a document has reached `document_bytes` bytes, it ends after the next run of blank lines.
    Once a document has reached 16 times `document_bytes`, it ends after the current line. If
    `document_bytes` is 0, the text is a single document.
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


def _json_rows(lines: Iterable[bytes], path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = parse_json(line)
        except ValueError as error:  # JSONDecodeError or UnicodeDecodeError
            remedy = _remedy(number, line, path)
            raise DataError(f"{where}: invalid JSON: {error}; {remedy}") from None
        if isinstance(row, list):
            raise DataError(f"{where}: rows must be objects, got a list; {_rewrite('.[]', path)}")
        yield where, row


def _remedy(number: int, line: bytes, path: Path) -> str:
    """Suggest a fix for a line that is not valid JSON by itself, but may be part of a JSON text."""
    line = line.strip()
    if number == 1 and line.startswith(b"<"):
        return "the file is HTML or XML, possibly after a failed download; download it again"
    if number == 1 and line.startswith(b"["):
        return f"the file is a single list that spans several lines; {_rewrite('.[]', path)}"
    if number == 1 and not line.endswith(b"}"):
        return f"if rows span several lines, {_rewrite('.', path)}; else fix or remove the line"
    return "fix or remove the line"


def _rewrite(rows: str, path: Path) -> str:
    command = rewritten(path, f"jq -c '{rows}'", "rows.jsonl")
    return f"write one row per line: {command}"


def row_text(row: object, where: str, key: str) -> str:
    """Return the value of `key` in a row.

    Raises:
        DataError: the key is missing, its value is not a string, or the value contains an unpaired
            surrogate, which UTF-8 cannot encode.
    """
    if not isinstance(row, Mapping) or key not in row:
        keys = ", ".join(row) if isinstance(row, Mapping) else f"a {type(row).__name__}"
        raise DataError(
            f"{where}: the row must have the key {key!r}, got {keys or 'no keys'}; set the text "
            "key with --text-key KEY or NAME:KEY=INPUT"
        )
    value = row[key]
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {key!r} must be a string, got {type(value).__name__}; fix or remove the row"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {key!r} is not valid Unicode: {error.reason}; fix or remove the row"
        ) from None
    return value
