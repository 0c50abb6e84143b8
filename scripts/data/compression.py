"""Decompress text files. The format is detected from the content, because suffixes can be wrong."""

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import pyarrow

from parallel.error_text import first_line
from training.errors import DataError
from training.json_file import POINTER, UNFETCHED

SUFFIXES: Final = {".gz": "gzip", ".xz": "xz", ".zst": "zstd", ".zstd": "zstd"}
_MAGIC: Final = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ\0": "xz",
    b"\x5d\0\0": "xz",  # the older .lzma
    b"\x28\xb5\x2f\xfd": "zstd",
    **{bytes((0x50 + i, 0x2A, 0x4D, 0x18)): "zstd" for i in range(16)},  # a skippable frame
}
_HEAD: Final = 512
"""Number of leading bytes read to detect a file's format."""
_READ: Final = 1 << 20
_ERRORS: Final = (OSError, EOFError, zlib.error, lzma.LZMAError)


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the decompressed lines of a text file, including line endings.

    Raises:
        DataError: the file is missing or not text, or the compressed data is corrupt, truncated or
            empty.
    """
    try:
        with _opened(path) as lines:
            start = lines.peek(_HEAD)
            _check_text(start[:_HEAD], path)
            if b"\r" in start[:-1] and b"\n" not in start:
                command = rewritten(path, r"sed 's/\r/\n/g'", f"lines{_plain(path).suffix}")
                raise DataError(f"{path} must end lines with \\n, got \\r; convert it: {command}")
            yield from lines
    except _ERRORS as error:
        reason = first_line(error)
        if isinstance(error, OSError) and error.errno is not None:
            problem = reason
        elif "too much memory" in reason:
            problem = (
                "its zstd window is over 128 MiB (zstd --long); recompress it: zstd -dc --long=31 "
                f"{path} | zstd -o {path.with_name(f'short.{path.name}')}"
            )
        else:
            problem = f"it is corrupt: {reason}"
        raise DataError(f"cannot read {path}: {problem}") from None


def _opened(path: Path) -> io.BufferedReader:
    with path.open("rb") as file:
        head = file.read(_HEAD)
    kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
    named = SUFFIXES.get(path.suffix)
    if named is not None and kind is None:
        empty = path.stat().st_size == 0
        raise DataError(
            f"cannot read {path}: it is empty, possibly after a failed download; download it again "
            "or delete it"
            if empty
            else f"cannot read {path}: it is not {named}; if it is plain text, rename it without "
            f"{path.suffix}"
        )
    match kind:
        case "gzip":
            return io.BufferedReader(gzip.open(path), _READ)
        case "xz":
            return io.BufferedReader(_XzStreams(path), _READ)
        case "zstd":
            return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"), _READ)
    return io.BufferedReader(path.open("rb", 0), _READ)


class _XzStreams(io.RawIOBase):
    """Reads all streams of an .xz file, skipping the padding between them.

    Python's `lzma.open` silently stops reading at padding, and at a damaged stream that is not the
    first one.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._blocks = _xz_blocks(self._file)
        self._pending = memoryview(b"")

    def readable(self) -> bool:
        """Return True, as `io` requires of a readable stream."""
        return True

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        """Copy up to one block into `buffer`. Return the number of bytes copied, 0 at the end."""
        if not self._pending:
            self._pending = memoryview(next(self._blocks, b""))
        size = min(len(buffer), len(self._pending))
        buffer[:size] = self._pending[:size]
        self._pending = self._pending[size:]
        return size

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def _xz_blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the decompressed content of all streams in an .xz file as nonempty blocks."""
    stream: lzma.LZMADecompressor | None = None
    padding = 0
    while content := file.read(_READ):
        while content:
            if stream is None:
                begin = content.lstrip(b"\0")
                padding += len(content) - len(begin)
                if not (content := begin):
                    break
                _check_padding(padding)
                stream, padding = lzma.LZMADecompressor(), 0
            if block := stream.decompress(content, _READ):
                yield block
            while not stream.eof and not stream.needs_input:
                if block := stream.decompress(b"", _READ):
                    yield block
            content = stream.unused_data if stream.eof else b""
            stream = None if stream.eof else stream
    if stream is not None:
        raise EOFError("Compressed file ended before the end-of-stream marker was reached")
    _check_padding(padding)


def _check_padding(size: int) -> None:
    if size % 4:
        raise lzma.LZMAError(f"stream padding must be a multiple of 4 bytes, got {size}")


def rewritten(path: Path, program: str, end: str) -> str:
    """Return a shell command that converts a file with `program`.

    The command pipes the decompressed file through `program` to a new file, and adds the suffix
    .old to the original, so that data preparation skips the original.
    """
    kind = SUFFIXES.get(path.suffix)
    command = f"{program} {path}" if kind is None else f"{kind} -dc {path} | {program}"
    return f"{command} > {_plain(path).with_suffix('')}.{end} && mv {path} {path}.old"


def _plain(path: Path) -> Path:
    """Return `path` without a compression suffix."""
    return path.with_suffix("") if path.suffix in SUFFIXES else path


def _check_text(head: bytes, path: Path) -> None:
    """Raise DataError if a file's first bytes show that it is not UTF-8 text."""
    if encoding := _encoding(head):
        end = f"utf8{_plain(path).suffix}"
        command = rewritten(path, f"iconv -f {encoding} -t UTF-8", end)
        raise DataError(f"{path} must be UTF-8, got {encoding}; convert it: {command}")
    what = next((what for magic, what in _FOREIGN.items() if head.startswith(magic)), None)
    if head[257:262] == b"ustar":
        what = "a tar archive: tar -xf {path}"
    if what is not None:
        raise DataError(f"{path} is {what.format(path=path, parquet=path.with_suffix('.parquet'))}")


def _encoding(head: bytes) -> str | None:
    """Detect UTF-16 and UTF-32 by byte order mark, and UTF-16 also by zeros in every other byte."""
    for mark, encoding in ((b"\xff\xfe\0\0", "UTF-32"), (b"\xff\xfe", "UTF-16"),
                           (b"\xfe\xff", "UTF-16")):  # fmt: skip
        if head.startswith(mark):
            return encoding
    for zeros, encoding in ((0, "UTF-16BE"), (1, "UTF-16LE")):
        if len(head) >= 4 and not any(head[zeros:64:2]) and all(head[1 - zeros : 64 : 2]):
            return encoding
    return None


_FOREIGN: Final = {
    b"PAR1": "a Parquet file: mv {path} {parquet}",
    b"ARROW1": "an Arrow file: convert it to Parquet with datasets or pyarrow",
    b"PK\x03\x04": "a zip archive: unzip {path}",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive: 7z x {path}",
    b"BZh91AY&SY": "compressed with bzip2: bunzip2 {path}",
    b"%PDF-": "a PDF: pdftotext {path}",
    POINTER: UNFETCHED,
    **{
        magic: kind + ", compressed twice: decompress {path} once"
        for magic, kind in _MAGIC.items()
        if magic != b"\x5d\0\0"
    },
}
"""Maps the first bytes of non-text files to their format and a fix."""
