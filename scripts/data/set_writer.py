"""Write documents one by one as a Megatron .bin/.idx pair."""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from training.data.document_index import write_index
from training.data.hashes import file_sha256, write_block_hashes
from training.data.manifest import SetEntry
from training.errors import DataError

RECORD: Final = np.dtype([("tokens", "<i4"), ("bytes", "<i8")])
"""The record of a document: its number of tokens and the size of its text."""
_PACK: Final = struct.Struct("<iq").pack


def token_dtype(vocab_size: int) -> str:
    """Return the type of token ids: uint16 below 65,500 tokens, as in Megatron, else int32."""
    return "uint16" if vocab_size < 65_500 else "int32"


def no_documents(name: str, source: list[str]) -> DataError:
    """Return the error for a set that would be empty."""
    return DataError(f"set {name} would be empty: {', '.join(source)} contains no documents")


@dataclass
class Written:
    """The size of a file of documents."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    max_token: int = -1


class DocumentFile:
    """Appends the tokens of documents to a file, and their records to a second file.

    Args:
        tokens: the path of the tokens.
        records: the path of the records.
        dtype: the type of a token.
        written: sizes that an interrupted run saved; the files are truncated to these sizes.
    """

    def __init__(self, tokens: Path, records: Path, dtype: str, written: Written) -> None:
        self.written = written
        size = written.tokens * np.dtype(dtype).itemsize
        self._tokens = _opened(tokens, size)
        self._records = _opened(records, written.documents * RECORD.itemsize)

    def add(self, tokens: NDArray[np.integer], size: int) -> None:
        """Add a document with its tokens, EOD included, and its `size` in bytes."""
        self._tokens.write(tokens.data)
        self._records.write(_PACK(len(tokens), size))
        written = self.written
        written.documents += 1
        written.tokens += len(tokens)
        written.bytes += size
        written.max_token = max(written.max_token, int(tokens.max()))

    def sync(self) -> None:
        """Flush the added tokens and records to the disk."""
        for file in (self._tokens, self._records):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close the files."""
        self._tokens.close()
        self._records.close()


def _opened(path: Path, size: int) -> BinaryIO:
    """Truncate a file to `size` bytes and open it for appending."""
    path.touch()
    if path.stat().st_size < size:
        raise DataError(f"{path} has lost bytes: it must have {size}, got {path.stat().st_size}")
    os.truncate(path, size)
    return path.open("ab")


def read_records(path: Path, first: int, count: int) -> Any:
    """Return records `[count]` of a file of documents, beginning with record `first`."""
    return np.fromfile(path, RECORD, count, offset=first * RECORD.itemsize)


class SetWriter(DocumentFile):
    """Writes a set to FOLDER/NAME.bin; `finish` writes the index.

    Args:
        folder: the folder of the set.
        state: the folder for the records of its documents.
        name: the name of the set.
        dtype: the type of a token.
        source: the sources of its documents, as given.
        written: sizes that an interrupted run saved.
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
        """Write the index and return the entry of the set for the manifest.

        `inputs` identify the inputs that were read. Raises:
            DataError: no document was added.
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
