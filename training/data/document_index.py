"""Megatron's index of a token file (document lengths and positions), and document borders within a
window.

megatron-core writes the same file from Python lists, which take about 150 bytes per document.
"""

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from training.errors import DataError

MAGIC: Final = b"MMIDIDX\x00\x00"
HEADER: Final = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document borders
CODES: Final = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
"""Codes of integer dtypes, copied from megatron-core's `DType`, which takes seconds to import."""
STEP: Final = 1 << 20
"""Number of documents or sequences held in memory at a time."""

Lengths = Callable[[int, int], NDArray[np.integer]]
"""Function of (first, count) that returns the lengths of `count` documents, starting with document
`first`."""


def write_index(path: Path, documents: int, lengths: Lengths, dtype: str) -> None:
    """Write the index of a token file with `documents` documents of one sequence each. Tokens are
    of type `dtype`."""
    width = np.dtype(dtype).itemsize
    blocks = [(first, min(STEP, documents - first)) for first in range(0, documents, STEP)]
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, CODES[dtype], documents, documents + 1))
        for block in blocks:
            file.write(lengths(*block).astype("<i4").tobytes())
        end = 0
        for block in blocks:
            sizes = lengths(*block).astype("<i8") * width
            ends = end + np.cumsum(sizes)
            file.write((ends - sizes).tobytes())
            end = int(ends[-1])
        for first in range(0, documents + 1, STEP):
            file.write(np.arange(first, min(first + STEP, documents + 1), dtype="<i8").tobytes())


@dataclass(frozen=True)
class DocumentIndex:
    """The documents in an index, each consisting of one or more sequences.

    lengths    number of tokens in each sequence
    places     byte offset of each sequence's first token, in ascending order
    borders    index of each document's first sequence, followed by the number of sequences
    dtype      type of the tokens
    """

    lengths: NDArray[np.int32]
    places: NDArray[np.int64]
    borders: NDArray[np.int64]
    dtype: np.dtype[Any]

    @property
    def end(self) -> int:
        """Byte offset after the last token."""
        return int(self.places[-1]) + int(self.lengths[-1]) * self.dtype.itemsize

    def starts(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the positions in `start` to `stop` - 1 at which documents start, in ascending
        order."""
        ends = np.array([start, stop], dtype=np.int64) * self.dtype.itemsize
        first, last = np.searchsorted(self.borders, np.searchsorted(self.places, ends))
        return np.unique(self.places[self.borders[first:last]]) // self.dtype.itemsize

    def count(self) -> int:
        """Return the number of nonempty documents.

        Raises ValueError if the documents are not in the same order as their tokens.
        """
        sequences = len(self.places)
        ordered, filled = self.borders[0] == 0 and self.borders[-1] == sequences, 0
        for first in range(0, len(self.borders) - 1, STEP):
            block = self.borders[first : first + STEP + 1]
            ordered = ordered and not (np.diff(block) < 0).any()
            if not ordered:
                raise ValueError("documents must be listed in the order of their tokens")
            places = self.places[np.minimum(block, sequences - 1)]
            places[block == sequences] = self.end
            filled += int(np.count_nonzero(np.diff(places)))
        return filled


def read_index(name: str, prefix: str) -> DocumentIndex:
    """Map the index of token set `name` into memory.

    Raises DataError if the index is corrupt or does not match the token file.
    """
    path = f"{prefix}.idx"
    corrupt = f"token set {name}: {path} is corrupt"
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise DataError(f"{corrupt}: the file must start with a Megatron index header")
    _, version, code, sequences, borders = HEADER.unpack(header)
    if version != 1:
        raise DataError(f"{corrupt}: version must be 1, got {version}")
    names = {code: dtype for dtype, code in CODES.items()}
    if code not in names:
        raise DataError(f"{corrupt}: dtype code must denote an integer type, got {code}")
    expected, size = HEADER.size + sequences * (4 + 8) + borders * 8, os.path.getsize(path)
    if size != expected:
        raise DataError(
            f"{corrupt}: for {sequences} sequences and {borders} document borders, the file must "
            f"have {expected} bytes, got {size}"
        )
    token_bytes = os.path.getsize(f"{prefix}.bin")
    if token_bytes == 0 or sequences == 0 or borders == 0:
        raise DataError(f"token set {name} ({prefix}) must contain tokens, got none")
    content = np.memmap(path, mode="r")
    places_start = HEADER.size + 4 * sequences
    index = DocumentIndex(
        np.frombuffer(content, np.int32, sequences, HEADER.size),
        np.frombuffer(content, np.int64, sequences, places_start),
        np.frombuffer(content, np.int64, borders, places_start + 8 * sequences),
        np.dtype(names[code]),
    )
    if index.borders[-1] != sequences:
        raise DataError(
            f"{corrupt}: the last document must end at sequence {sequences}, got sequence "
            f"{index.borders[-1]}"
        )
    end = 0
    for first in range(0, sequences, STEP):
        part = slice(first, first + STEP)
        lengths = index.lengths[part]
        ends = end + np.cumsum(lengths, dtype=np.int64) * index.dtype.itemsize
        if (lengths < 0).any() or (np.append(end, ends[:-1]) != index.places[part]).any():
            raise DataError(f"{corrupt}: its sequences are not contiguous")
        end = int(ends[-1])
    if token_bytes != end:
        raise DataError(
            f"token set {name}: {prefix}.bin must have {end} bytes according to the index, got "
            f"{token_bytes}: one of the two files is truncated or from another preparation"
        )
    return index


@dataclass(frozen=True)
class Borders:
    """Options for document borders.

    mask               restrict attention to each document, and restart its positions at 0
    first_token_loss   include the loss on each document's first token
    """

    mask: bool = False
    first_token_loss: bool = True

    @property
    def needed(self) -> bool:
        """Whether batches must include the document borders."""
        return self.mask or not self.first_token_loss


CROSSED: Final = Borders()
"""Default: attention crosses document borders, and all tokens contribute to the loss."""
