"""A token set: the tokens in a .bin/.idx pair as a single stream, split into windows."""

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from training.data.document_index import Borders, read_index
from training.data.hashes import BlockHashes, file_sha256
from training.data.manifest import MANIFEST_FILE, SetEntry, manifest_of
from training.errors import TOKEN_FILES, DataError, MissingSetError

_SCAN = 1 << 24  # number of tokens read at a time when scanning a whole set

Verify = Literal["none", "sample", "full"]
WHOLE = 1 << 28
"""Maximum size, in bytes, of a set without block hashes that is read in full at startup."""
SPREAD = 64
"""Number of blocks verified at startup with `verify="sample"`."""
SPREAD_WINDOWS = 1024
"""Number of windows per set over which the attended length is averaged."""


class TokenSet:
    """Tokens in a .bin/.idx pair, as windows of `sequence_length + 1` tokens.

    The documents are concatenated into one stream. Window i starts at token `i * sequence_length`,
    so consecutive windows overlap by one token: the last target of a window is the first input of
    the next. Each token except the first is a target exactly once. Tokens after the last full
    window are not used.

    Args:
        name: name of the set in the config, used in errors.
        prefix: path of both files, without suffix.
        sequence_length: number of tokens predicted per window.
        vocab_size: exclusive upper bound on token ids in windows; None disables the check.
        verify: what to verify against the hashes in the folder's manifest. none: nothing; sample:
            the index and 64 blocks of tokens up front, all other blocks on first use; full:
            everything up front.
        share: (index of this rank, number of ranks); with `full`, the ranks split the blocks.

    Raises:
        DataError: a file is missing, truncated, corrupt or does not match the manifest, or there is
            no full window. `read` may also raise DataError.
    """

    def __init__(
        self,
        name: str,
        prefix: str | Path,
        sequence_length: int,
        *,
        vocab_size: int | None = None,
        verify: Verify = "none",
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.name = name
        self.prefix = str(prefix)
        self.sequence_length = sequence_length
        for suffix in (".idx", ".bin"):
            if not os.path.isfile(self.prefix + suffix):
                raise MissingSetError(no_file(name, self.prefix, suffix))
        self._facts = self._file_facts()
        self._index = read_index(name, self.prefix)
        self._bytes = np.frombuffer(np.memmap(self.prefix + ".bin", mode="r"), np.uint8)
        self._tokens = self._bytes.view(self._index.dtype)
        self.tokens = len(self._tokens)
        if len(self) == 0:
            raise DataError(
                f"token set {name} ({prefix}) must contain at least {sequence_length + 1} tokens "
                f"for sequence_length {sequence_length}, got {self.tokens}"
            )
        self.vocab_size = vocab_size
        self._blocks = None if verify == "none" else self._verified(verify, share)

    def __len__(self) -> int:
        return (self.tokens - 1) // self.sequence_length

    def window(self, index: int) -> NDArray[np.int64]:
        """Return window `index`, `[sequence_length + 1]`."""
        return self.read(index * self.sequence_length, self.sequence_length + 1).astype(np.int64)

    def sample(self, index: int, borders: Borders) -> NDArray[np.int64]:
        """Return window `index`. If borders are needed, add a second row: for each token, the
        position in the window at which the token's document starts. The shape is then `[2,
        sequence_length + 1]`."""
        window = self.window(index)
        if not borders.needed:
            return window
        begin = index * self.sequence_length
        starts = self.starts(begin, begin + len(window)) - begin
        firsts = np.zeros(len(window), dtype=np.int64)
        firsts[starts] = starts
        return np.stack([window, np.maximum.accumulate(firsts)])

    def starts(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the positions in `start` to `stop` - 1 at which documents start, in ascending
        order."""
        return self._index.starts(start, stop)

    def documents(self) -> int:
        """Return the number of nonempty documents. Raise DataError if the index is corrupt."""
        try:
            return self._index.count()
        except ValueError as error:
            raise DataError(
                f"token set {self.name}: {self.prefix}.idx is corrupt: {error}"
            ) from error

    def check_documents(self, borders: Borders) -> None:
        """Raise DataError if the index contains fewer than two documents. If first tokens are
        excluded from the loss, also raise DataError if every document is a single token."""
        documents = self.documents()
        if documents < 2:
            raise DataError(
                f"token set {self.name}: {self.prefix}.idx must contain at least two documents, "
                "got one: data.document_mask and data.first_token_loss=false depend on document "
                "boundaries; prepare the data again with separate documents"
            )
        if not borders.first_token_loss and documents == self.tokens:
            raise DataError(
                f"token set {self.name}: at least one document in {self.prefix}.idx must have two "
                "or more tokens, got only single-token documents: data.first_token_loss=false "
                "excludes the first token of every document from the loss"
            )

    @cached_property
    def attended_length(self) -> float:
        """Attended length L of this set: on average, a token attends to as many keys as if all
        documents had length L. The average is taken over evenly spaced windows."""
        length = self.sequence_length
        windows = np.linspace(0, len(self) - 1, min(len(self), SPREAD_WINDOWS), dtype=np.int64)
        squares = 0
        for begin in (windows * length).tolist():
            starts = self.starts(begin, begin + length) - begin
            lengths = np.diff(starts[starts > 0], prepend=0, append=length)
            squares += int((lengths**2).sum())
        return squares / (len(windows) * length)

    def read(self, start: int, count: int) -> NDArray[np.integer]:
        """Return `count` tokens of the stream starting at `start`, as a view `[count]` of the file.

        Raises DataError if the tokens are corrupt or out of vocabulary.
        """
        tokens = self._stored(start, count)
        if self.vocab_size is not None and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            wrong = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
            raise DataError(
                f"token set {self.name} ({self.prefix}): token ids must be in [0, vocab_size = "
                f"{self.vocab_size}), got {wrong[0]} ({len(wrong)} invalid ids in tokens "
                f"{start} to {start + count - 1})"
            )
        return tokens

    def _stored(self, start: int, count: int) -> NDArray[np.integer]:
        """Verify the blocks that contain the tokens, and return the tokens without checking their
        ids."""
        size = self._tokens.itemsize
        available = os.path.getsize(self.prefix + ".bin")  # a read past the end kills the process
        if available < (start + count) * size:
            raise DataError(
                f"token set {self.name}: {self.prefix}.bin was truncated to {available} bytes "
                "while in use"
            )
        if self._blocks is not None:
            self._blocks.check_bytes(start * size, (start + count) * size)
        return self._tokens[start : start + count]

    def blocks(self, start: int, stop: int) -> Iterator[NDArray[np.integer]]:
        """Yield tokens `start` to `stop` in blocks that fit in memory."""
        for first in range(start, stop, _SCAN):
            yield self.read(first, min(_SCAN, stop - first))

    def document_parts(self, start: int, stop: int) -> Iterator[tuple[NDArray[np.integer], int]]:
        """For each document that overlaps tokens `start` to `stop`, yield (its tokens up to `stop`,
        the number of its tokens before `start`)."""
        size, offsets = self._tokens.itemsize, self._index.places
        first = int(np.searchsorted(offsets, start * size, side="right")) - 1
        last = int(np.searchsorted(offsets, stop * size, side="left"))
        lengths = self._index.lengths[first:last].tolist()
        for offset, length in zip(offsets[first:last].tolist(), lengths, strict=True):
            begin = offset // size
            if length:
                yield self.read(begin, min(length, stop - begin)), max(0, start - begin)

    @cached_property
    def entry(self) -> SetEntry | None:
        """This set's entry in the folder's manifest, or None if there is no manifest.

        Raises:
            DataError: the manifest is unreadable or lists a different number of tokens.
        """
        manifest = manifest_of(self.prefix)
        entry = None if manifest is None else manifest.sets[Path(self.prefix).name]
        if entry is not None and entry.tokens != self.tokens:
            raise DataError(
                f"token set {self.name}: {self.prefix}.bin contains {self.tokens} tokens, but the "
                f"manifest in its folder lists {entry.tokens}"
            )
        return entry

    @property
    def stated_sha256(self) -> str | None:
        """SHA-256 of the tokens as listed in the manifest, or None if there is no manifest."""
        return None if self.entry is None else self.entry.sha256.get("bin")

    def _verified(self, verify: Verify, share: tuple[int, int]) -> BlockHashes | None:
        """Verify the files and blocks selected by `verify`. Return the block hashes, or None if the
        set has no block hashes."""
        stated = self.entry and self.entry.sha256
        if not stated:
            if verify == "full":
                raise DataError(
                    f"token set {self.name}: data.verify=full requires hashes, but no "
                    f"{MANIFEST_FILE} in the folder of {self.prefix} contains hashes for this set"
                )
            return None
        blocks = "blocks" in stated
        for kind, expected in stated.items():
            if kind == "bin" and (blocks or (verify == "sample" and len(self._bytes) > WHOLE)):
                continue
            if file_sha256(f"{self.prefix}.{kind}") != expected:
                raise DataError(
                    f"token set {self.name}: {self.prefix}.{kind} is corrupt: the file's sha256 "
                    f"differs from the sha256 in {MANIFEST_FILE}"
                )
        if not blocks:
            return None
        hashes = BlockHashes(self.prefix, self._bytes)
        rank, ranks = share
        spread = np.linspace(0, len(hashes) - 1, SPREAD, dtype=np.int64)
        hashes.check(range(rank, len(hashes), ranks) if verify == "full" else spread.tolist())
        return hashes

    @cached_property
    def token_range(self) -> tuple[int, int]:
        """Smallest token id (0 if no id is negative) and largest token id. Taken from the manifest
        or, without a manifest, from a scan of the set."""
        if self.entry is not None:
            return 0, self.entry.max_token
        smallest, largest = 0, 0
        for first in range(0, self.tokens, _SCAN):
            tokens = self._stored(first, min(_SCAN, self.tokens - first))
            smallest, largest = min(smallest, int(tokens.min())), max(largest, int(tokens.max()))
        return smallest, largest

    def unigram_entropy(self) -> float:
        """Return the entropy of the set's token frequencies in nats.

        Without context, no model can achieve a loss below this entropy. A model whose loss is not
        below this entropy has learned at best the token frequencies.
        """
        counts = np.zeros(0, dtype=np.int64)
        for block in self.blocks(0, self.tokens):
            before, counts = counts, np.bincount(block, minlength=len(counts))
            counts[: len(before)] += before
        frequency = counts[counts > 0] / self.tokens
        return float(-(frequency * np.log(frequency)).sum())

    @property
    def modified(self) -> str | None:
        """Modification time of the token file, or None if `digest` or a manifest covers all tokens
        in the file."""
        facts = os.stat(self.prefix + ".bin")
        if facts.st_size <= WHOLE or self.stated_sha256 is not None:
            return None
        return datetime.fromtimestamp(facts.st_mtime, UTC).isoformat()

    @property
    def rewritten(self) -> bool:
        """Whether the token file was modified or replaced after it was opened.

        Block hashes do not detect this, because each block is verified only once.
        """
        return self._file_facts() != self._facts

    def _file_facts(self) -> tuple[int, int, int] | None:
        """Return the token file's inode, size and modification time, or None if it is missing."""
        try:
            facts = os.stat(self.prefix + ".bin")
        except OSError:
            return None
        return facts.st_ino, facts.st_size, facts.st_mtime_ns

    @cached_property
    def digest(self) -> str:
        """SHA-256 digest that identifies the set. The digest covers the sizes of both files, the
        index (which contains all document lengths) and the tokens. If the index exceeds 64 MiB,
        only its first and last 32 MiB are covered. If the token file exceeds `WHOLE` bytes, only 64
        evenly spaced blocks of 4 KiB are covered.
        """
        digest = hashlib.sha256()
        for suffix, whole, spread, size in (
            (".idx", 64 << 20, 2, 32 << 20),
            (".bin", WHOLE, 64, 4 << 10),
        ):
            total = os.path.getsize(self.prefix + suffix)
            digest.update(struct.pack("<Q", total))
            with open(self.prefix + suffix, "rb") as file:
                if total <= whole:
                    while content := file.read(1 << 24):
                        digest.update(content)
                    continue
                for block in range(spread):
                    file.seek((total - size) * block // (spread - 1))
                    digest.update(file.read(size))
        return digest.hexdigest()


def check_vocabulary(sets: Sequence[TokenSet], vocab_size: int) -> None:
    """Check that every token id in the sets is in [0, `vocab_size`).

    Raises:
        DataError: an id is out of range; the message gives the set, the id and the vocabulary size.
    """
    wrong = [
        f"token set {each.name} ({each.prefix}): token ids must be in [0, vocab_size = "
        f"{vocab_size}), got {token}"
        for each in sets
        for token in each.token_range
        if not 0 <= token < vocab_size
    ]
    if wrong:
        raise DataError("\n".join(wrong))


def no_file(name: str, prefix: str, suffix: str) -> str:
    """Return the error message for a missing file of a set, suggesting sets in the same folder."""
    path = Path(prefix)
    folder = path if path.is_dir() else path.parent
    sets = sorted(str(each.with_suffix("")) for each in folder.glob("*.idx"))[:4]
    hint = ""
    if sets and suffix == ".idx":
        hint = f"; path must be a prefix without .bin and .idx, such as {', '.join(sets)}"
    elif any(os.path.isfile(prefix + end) for end in ("", ".bin", ".npy")):
        hint = f"; {TOKEN_FILES}"
    return f"token set {name}: file {prefix}{suffix} does not exist{hint}"
