"""Random tokens, for benchmarks and rehearsals that need no text."""

import hashlib
import math
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training.data.token_set import TokenSet

WINDOWS = 1 << 20
"""Number of windows in a set, i.e. the length of an epoch."""

VOCABULARY = 50_304
"""Vocabulary size if neither the config nor a manifest defines it."""

BLOCK = 1 << 12
"""Number of tokens drawn at a time."""

DOCUMENTS = 4
"""Number of documents that start in each block; their mean length is 1,024 tokens."""


class MockTokens(TokenSet):
    """A stream of random tokens in which the frequency of the k-th most frequent token is roughly
    proportional to 1 / k.

    The stream depends only on the set's name and the vocabulary size, and is the same on every
    machine.

    Args:
        name: name of the set in the config.
        prefix: path in the config; no file is read.
        sequence_length: number of tokens predicted per window.
        vocabulary: number of token ids.
    """

    modified = None
    rewritten = False
    entry = None  # without a manifest, the size of the text in bytes is unknown

    def __init__(
        self, name: str, prefix: str | Path, sequence_length: int, *, vocabulary: int
    ) -> None:
        self.name = name
        self.prefix = str(prefix)
        self.sequence_length = sequence_length
        self.vocabulary = vocabulary
        self.tokens = WINDOWS * sequence_length + 1
        self._seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")

    def read(self, start: int, count: int) -> NDArray[np.integer]:
        """Return `count` tokens `[count]` of the stream, starting at token `start`."""
        first, last = start // BLOCK, (start + count - 1) // BLOCK
        generators = [np.random.default_rng((self._seed, i)) for i in range(first, last + 1)]
        uniform = np.concatenate([generator.random(BLOCK) for generator in generators])
        ranks = np.exp(uniform * math.log(self.vocabulary + 1)).astype(np.int64) - 1
        return np.minimum(ranks, self.vocabulary - 1)[start - first * BLOCK :][:count]

    def starts(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the document starts within tokens `start` to `stop`, in ascending order."""
        blocks = range(start // BLOCK, (stop - 1) // BLOCK + 1)
        drawn = [
            np.random.default_rng((self._seed, i, 1)).integers(0, BLOCK, DOCUMENTS) + i * BLOCK
            for i in blocks
        ]
        starts = np.unique(np.concatenate(drawn))
        return starts[(start <= starts) & (starts < stop)]

    @cached_property
    def token_range(self) -> tuple[int, int]:
        """Smallest and largest token id."""
        return 0, self.vocabulary - 1

    def unigram_entropy(self) -> float:
        """Return the entropy of the token distribution in nats."""
        edges = np.log(np.arange(1, self.vocabulary + 2)) / math.log(self.vocabulary + 1)
        shares = np.diff(edges)
        return float(-(shares * np.log(shares)).sum())

    @cached_property
    def digest(self) -> str:
        """SHA-256 digest that identifies the set."""
        facts = f"mock {self.name} {self.vocabulary} {self.tokens}"
        return hashlib.sha256(facts.encode()).hexdigest()
