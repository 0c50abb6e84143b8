"""Megatron's index of a token file: the length and the place of every document.

megatron-core writes the same file from lists of Python numbers, about 150 bytes a document.
"""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from megatron.core.datasets.indexed_dataset import DType
from numpy.typing import NDArray

MAGIC: Final = b"MMIDIDX\x00\x00"
HEADER: Final = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document borders
STEP: Final = 1 << 20
"""Documents that are in memory at a time."""

Lengths = Callable[[int, int], NDArray[np.integer]]
"""What returns the tokens of each of `count` documents from `first` on, `[count]`."""


def write_index(path: Path, documents: int, lengths: Lengths, dtype: str) -> None:
    """Write the index of documents, each one sequence, with tokens of type `dtype`."""
    width = np.dtype(dtype).itemsize
    blocks = [(first, min(STEP, documents - first)) for first in range(0, documents, STEP)]
    with path.open("wb") as file:
        code = DType.code_from_dtype(np.dtype(dtype).type)
        file.write(HEADER.pack(MAGIC, 1, code, documents, documents + 1))
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
