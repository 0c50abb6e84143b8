"""Hashes of whole files and of the blocks of token files. Blocks are verified when they are first
used.

NAME.blocks stores a 16-byte BLAKE2b hash for each 64 KiB block of NAME.bin, and is 0.02% as large
as NAME.bin. A hash of the whole file would be just as safe, but verifying it would require reading
the whole file.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from parallel.error_text import os_error_text
from training.errors import DataError
from training.json_file import check_regular

SUFFIX: Final = ".blocks"
BLOCK: Final = 1 << 16
DIGEST: Final = 16


def block_hash(content: bytes | memoryview) -> bytes:
    """Hash one block."""
    return hashlib.blake2b(content, digest_size=DIGEST).digest()


def write_block_hashes(prefix: str | Path) -> None:
    """Write the block hashes of PREFIX.bin to PREFIX.blocks."""
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
        raise DataError(f"cannot read file: {os_error_text(error, path)}") from None


class BlockHashes:
    """Verifies each block of PREFIX.bin once against its hash in PREFIX.blocks.

    prefix   path of both files, without suffix
    content  bytes of PREFIX.bin, uint8 `[size]`

    PREFIX.blocks must have been verified. The methods raise DataError if a block does not match.
    """

    def __init__(self, prefix: str, content: NDArray[np.uint8]) -> None:
        self._prefix = prefix
        self._content = content
        blocks = -(-len(content) // BLOCK)
        self._hashes = np.memmap(prefix + SUFFIX, np.uint8, "r", shape=(blocks, DIGEST))
        self._seen = np.zeros(blocks, dtype=bool)

    def __len__(self) -> int:
        return len(self._seen)

    def check_bytes(self, start: int, stop: int) -> None:
        """Verify the blocks that contain bytes `start` to `stop`."""
        self.check(range(start // BLOCK, -(-stop // BLOCK)))

    def check(self, blocks: Iterable[int]) -> None:
        """Verify `blocks`, skipping blocks that have already been verified."""
        for block in blocks:
            if self._seen[block]:
                continue
            offset = block * BLOCK
            content = self._content[offset : offset + BLOCK]
            if block_hash(content.data) != self._hashes[block].tobytes():
                raise DataError(
                    f"{self._prefix}.bin is corrupt: bytes {offset} to {offset + len(content)} do "
                    "not match their stored hash"
                )
            self._seen[block] = True
