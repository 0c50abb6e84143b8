"""Megatron's index of a token file (lengths and positions of documents), and the borders between
documents in a window.

megatron-core writes the same file from Python lists, which need about 150 bytes per document.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

MAGIC: Final = b"MMIDIDX\x00\x00"
HEADER: Final = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document borders
CODES: Final = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
"""Codes of the integer dtypes, those of megatron-core's `DType`, whose import takes seconds."""
STEP: Final = 1 << 20
"""Number of documents in memory at a time."""

Lengths = Callable[[int, int], NDArray[np.integer]]
"""Function from (first, count) to the lengths of `count` documents starting at `first`."""


def write_index(path: Path, documents: int, lengths: Lengths, dtype: str) -> None:
    """Write the index of `documents` documents, each of one sequence, with tokens of `dtype`."""
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
    """The documents of an index, each of one or several sequences.

    places     byte offset of each sequence's first token, ascending
    borders    index of each document's first sequence, then the number of sequences
    tokens     number of tokens in all documents
    itemsize   bytes per token
    """

    places: NDArray[np.int64]
    borders: NDArray[np.int64]
    tokens: int
    itemsize: int

    def starts(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the starts of documents within tokens `start` to `stop`, ascending."""
        ends = np.array([start, stop], dtype=np.int64) * self.itemsize
        first, last = np.searchsorted(self.borders, np.searchsorted(self.places, ends))
        return np.unique(self.places[self.borders[first:last]]) // self.itemsize

    def count(self) -> int:
        """Return the number of documents that contain tokens.

        Raises ValueError if the documents are not in the order of the tokens.
        """
        sequences = len(self.places)
        ordered, filled = self.borders[0] == 0 and self.borders[-1] == sequences, 0
        for first in range(0, len(self.borders) - 1, STEP):
            block = self.borders[first : first + STEP + 1]
            ordered = ordered and not (np.diff(block) < 0).any()
            if not ordered:
                raise ValueError("documents must be in the order of the tokens")
            places = self.places[np.minimum(block, sequences - 1)]
            places[block == sequences] = self.tokens * self.itemsize
            filled += int(np.count_nonzero(np.diff(places)))
        return filled


SPREAD: Final = 1024
"""Number of windows of a set over which the attended length is averaged."""


@dataclass(frozen=True)
class Borders:
    """Treatment of the borders between documents.

    mask               restrict attention to each document, and start its positions at 0
    first_token_loss   include the loss of each document's first token
    """

    mask: bool = False
    first_token_loss: bool = True

    @property
    def needed(self) -> bool:
        """Whether a batch must contain the borders."""
        return self.mask or not self.first_token_loss


CROSSED: Final = Borders()
"""Default treatment: attention crosses borders, and all tokens have a loss."""


def first_tokens(starts: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the position of the first token of each token's document, `[count]`.

    `starts` are the positions of documents' first tokens, ascending. For a document that begins
    before these `count` tokens, the position is 0.
    """
    firsts = np.zeros(count, dtype=np.int64)
    firsts[starts] = starts
    return np.maximum.accumulate(firsts)


def squared_length(starts: NDArray[np.int64], count: int) -> int:
    """Return the sum of the squared lengths of the documents that start at `starts`, in `count`
    tokens."""
    lengths = np.diff(starts[starts > 0], prepend=0, append=count)
    return int((lengths**2).sum())
