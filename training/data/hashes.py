"""Hashes of whole files, and of a token file's blocks, which are compared at their first use.

NAME.blocks contains 16 bytes of BLAKE2b for each 64 KiB of NAME.bin, 0.02% of its size. A hash of
the whole file would be as safe, but to compare it a rank would have to read the whole file.
"""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from parallel.error_text import described
from training.errors import DataError
from training.json_file import check_regular

SUFFIX: Final = ".blocks"
BLOCK: Final = 1 << 16
DIGEST: Final = 16


def block_hash(content: bytes | memoryview) -> bytes:
    """Return the hash of one block."""
    return hashlib.blake2b(content, digest_size=DIGEST).digest()


def write_block_hashes(prefix: str | Path) -> None:
    """Write PREFIX.blocks with the hashes of PREFIX.bin."""
    with open(f"{prefix}.bin", "rb") as tokens, open(f"{prefix}{SUFFIX}", "wb") as hashes:
        while content := tokens.read(BLOCK):
            hashes.write(block_hash(content))


def file_sha256(path: str | Path) -> str:
    """Return the sha256 of a file. Raise DataError if the file cannot be read."""
    try:
        check_regular(Path(path))
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read a file: {described(error, path)}") from None


class BlockHashes:
    """Comparison of each block of PREFIX.bin, once, with its hash in the verified PREFIX.blocks.

    prefix  path of both files without suffix
    size    bytes of PREFIX.bin
    read    function from (offset, count) to bytes of PREFIX.bin, `[count]` uint8

    The methods raise DataError if a block has changed.
    """

    def __init__(
        self, prefix: str, size: int, read: Callable[[int, int], NDArray[np.uint8]]
    ) -> None:
        self._prefix = prefix
        self._size = size
        self._read = read
        blocks = -(-size // BLOCK)
        self._hashes = np.memmap(prefix + SUFFIX, np.uint8, "r", shape=(blocks, DIGEST))
        self._seen = np.zeros(blocks, dtype=bool)

    def __len__(self) -> int:
        return len(self._seen)

    def check_bytes(self, start: int, stop: int) -> None:
        """Compare the blocks that contain the bytes from `start` to `stop`."""
        self.check(range(start // BLOCK, -(-stop // BLOCK)))

    def check(self, blocks: Iterable[int]) -> None:
        """Compare the blocks of `blocks` that were not compared before."""
        for block in blocks:
            if self._seen[block]:
                continue
            offset = block * BLOCK
            content = self._read(offset, min(BLOCK, self._size - offset))
            if block_hash(content.data) != self._hashes[block].tobytes():
                raise DataError(
                    f"{self._prefix}.bin is damaged: bytes {offset} to {offset + len(content)} "
                    "differ from their stored hash"
                )
            self._seen[block] = True
