"""Write documents one by one to Megatron .bin and .idx files."""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from training.data.document_index import write_index
from training.data.hashes import file_sha256, write_block_hashes
from training.data.manifest import SetEntry
from training.errors import DataError, ProgressError

RECORD: Final = np.dtype([("tokens", "<i4"), ("bytes", "<i8")])
"""A document's record: its number of tokens, and the size of its text in bytes."""
_PACK: Final = struct.Struct("<iq").pack


def token_dtype(vocab_size: int) -> str:
    """Return the token dtype: uint16 for vocabularies below 65,500, as in Megatron, else int32."""
    return "uint16" if vocab_size < 65_500 else "int32"


def no_documents(name: str, source: list[str]) -> DataError:
    """Return the DataError for a set without documents."""
    return DataError(f"token set {name} would be empty: no documents in {', '.join(source)}")


@dataclass
class Written:
    """Document, token and byte counts of a file, its largest token id, and the CRC-32 of its tokens
    and records."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    max_token: int = -1
    tokens_crc: int = 0
    records_crc: int = 0


class DocumentFile:
    """A token file and a record file that documents are appended to.

    Args:
        tokens: path to the token file.
        records: path to the record file.
        dtype: token dtype.
        written: counts saved by an interrupted run. The files are truncated to these counts.

    Raises ProgressError if the files do not have the content that the interrupted run wrote.
    """

    def __init__(self, tokens: Path, records: Path, dtype: str, written: Written) -> None:
        self.written = written
        _cut(tokens, written.tokens * np.dtype(dtype).itemsize, written.tokens_crc)
        _cut(records, written.documents * RECORD.itemsize, written.records_crc)
        self._tokens, self._records = tokens.open("ab"), records.open("ab")

    def add(self, tokens: NDArray[np.integer], size: int) -> None:
        """Append a document, given its tokens including EOD. `size` is the text size in bytes."""
        record, written = _PACK(len(tokens), size), self.written
        self._tokens.write(tokens.data)
        self._records.write(record)
        written.tokens_crc = crc32(tokens.data, written.tokens_crc)
        written.records_crc = crc32(record, written.records_crc)
        written.documents += 1
        written.tokens += len(tokens)
        written.bytes += size
        written.max_token = max(written.max_token, int(tokens.max()))

    def sync(self) -> None:
        """Sync all appended tokens and records to disk."""
        for file in (self._tokens, self._records):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close both files."""
        self._tokens.close()
        self._records.close()


def _cut(path: Path, size: int, crc: int) -> None:
    """Truncate a file to `size` bytes, creating it if necessary, and check its CRC-32."""
    path.touch()
    if path.stat().st_size < size:
        raise ProgressError(
            f"{path} is truncated: it must have at least {size} bytes, got {path.stat().st_size}"
        )
    os.truncate(path, size)
    found = 0
    with path.open("rb") as file:
        while content := file.read(1 << 20):
            found = crc32(content, found)
    if found != crc:
        raise ProgressError(f"{path} was changed after the preparation was interrupted")


def read_records(path: Path, first: int, count: int) -> Any:
    """Return `count` records of a document file, starting at record `first`."""
    return np.fromfile(path, RECORD, count, offset=first * RECORD.itemsize)


class SetWriter(DocumentFile):
    """Writes a set's tokens to FOLDER/NAME.bin; `finish` writes the index FOLDER/NAME.idx.

    Args:
        folder: folder for the set.
        state: folder for the document records.
        name: set name.
        dtype: token dtype.
        source: document sources, as given on the command line.
        written: counts saved by an interrupted run.
    """

    def __init__(
        self, folder: Path, state: Path, name: str, dtype: str, source: list[str], written: Written
    ) -> None:
        self._prefix = folder / name
        self._documents = state / f"{name}.documents"
        self._dtype = dtype
        self._source = source
        super().__init__(folder / f"{name}.bin", self._documents, dtype, written)

    def finish(self, inputs: list[str]) -> SetEntry:
        """Write the index and return the set's manifest entry.

        `inputs` contains the identities of the inputs that were read. Raises DataError if no
        documents were added.
        """
        self.sync()
        name, written = self._prefix.name, self.written
        if not written.documents:
            raise no_documents(name, self._source)
        index = self._prefix.with_name(f"{name}.idx")
        write_index(index, written.documents, self._lengths, self._dtype)
        write_block_hashes(self._prefix)
        return SetEntry(
            documents=written.documents,
            tokens=written.tokens,
            bytes=written.bytes,
            max_token=written.max_token,
            dtype=self._dtype,
            sha256={
                suffix: file_sha256(f"{self._prefix}.{suffix}")
                for suffix in ("bin", "idx", "blocks")
            },
            source=self._source,
            inputs=inputs,
        )

    def _lengths(self, first: int, count: int) -> Any:
        return read_records(self._documents, first, count)["tokens"]
