"""Tokens that are made instead of read: for benchmarks and rehearsals, which need no text."""

import hashlib
import math
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training.data.manifest import SetEntry

WINDOWS = 1 << 20
"""Windows of a set; the order of samples goes on with another permutation after them."""

VOCABULARY = 50_304
"""Size of the vocabulary where neither the config nor a manifest names one."""


class MockTokens:
    """A set of windows of random tokens, of which the k-th most frequent has about the share 1 / k.

    A window is a function of (name, index), the same on every machine. It stands where a
    `training.data.token_set.TokenSet` does.

    Args:
        name: the name of the set in the config.
        prefix: path that the config names; nothing is read there.
        sequence_length: tokens the model predicts per window.
        vocabulary: number of token ids.
    """

    entry: SetEntry | None = None
    """No manifest tells how many bytes of text the tokens stand for."""

    def __init__(
        self, name: str, prefix: str | Path, sequence_length: int, *, vocabulary: int
    ) -> None:
        self.name = name
        self.prefix = str(prefix)
        self.sequence_length = sequence_length
        self.vocabulary = vocabulary
        self.tokens = WINDOWS * sequence_length + 1
        self._seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")

    def __len__(self) -> int:
        return WINDOWS

    def window(self, index: int) -> NDArray[np.int64]:
        """Window `index`, `[sequence_length + 1]`."""
        if not 0 <= index < WINDOWS:
            raise IndexError(f"window must be in [0, {WINDOWS}), got {index}")
        uniform = np.random.default_rng((self._seed, index)).random(self.sequence_length + 1)
        ranks = np.exp(uniform * math.log(self.vocabulary + 1)).astype(np.int64) - 1
        return np.minimum(ranks, self.vocabulary - 1)

    def max_token(self) -> int:
        """Return the largest token id."""
        return self.vocabulary - 1

    def unigram_entropy(self) -> float:
        """Entropy of the distribution that tokens are drawn from, in nats."""
        return float(-(self._shares * np.log(self._shares)).sum())

    @cached_property
    def _shares(self) -> NDArray[np.float64]:
        """Probability of each token id, `[vocabulary]`."""
        edges = np.log(np.arange(1, self.vocabulary + 2)) / math.log(self.vocabulary + 1)
        return np.diff(edges)

    def digest(self) -> str:
        """Return a sha256 that tells one set from another."""
        facts = f"mock {self.name} {self.vocabulary} {self.sequence_length}"
        return hashlib.sha256(facts.encode()).hexdigest()
