"""Windows of a validation set, and the number of text bytes they contain."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.data.document_index import CROSSED, Borders
from training.data.token_bytes import decoded_bytes, open_tokenizer
from training.data.token_set import TokenSet
from training.errors import DataError


class ValidationData:
    """The first windows of a validation set. On any layout, each window is evaluated exactly once.

    Args:
        token_set: the set. Tokens after the last full window are not used.
        samples: maximum number of windows; None uses the whole set.
        token_bytes: int32 `[vocab]` from `token_byte_lengths`, for a byte-level tokenizer.
        tokenizer: tokenizer.json used to decode the tokens if `token_bytes` is None. If both are
            None, the number of bytes is estimated from the manifest's mean bytes per token; without
            a manifest, the number is unknown.
        borders: how to treat document borders.

    Raises:
        DataError: a token id has no entry in `token_bytes`.
    """

    def __init__(
        self,
        token_set: TokenSet,
        *,
        samples: int | None = None,
        token_bytes: Tensor | None = None,
        tokenizer: Path | None = None,
        borders: Borders = CROSSED,
    ) -> None:
        self.name = token_set.name
        self.set = token_set
        self.borders = borders
        self.samples = min(len(self.set), samples or len(self.set))
        self.target_tokens = self.samples * token_set.sequence_length
        left_out: list[int] = []
        if not borders.first_token_loss:
            left_out = self.set.starts(1, self.target_tokens + 1).tolist()
        self.counted_tokens = self.target_tokens - len(left_out)
        self.target_bytes = self._target_bytes(token_bytes, tokenizer)
        if self.target_bytes is not None:
            tokens = [int(self.set.read(position, 1)[0]) for position in left_out]
            if token_bytes is not None:
                self.target_bytes -= float(token_bytes[tokens].sum())
            else:  # estimate from the mean over all targets
                self.target_bytes -= len(tokens) * self.target_bytes / self.target_tokens

    def _target_bytes(self, token_bytes: Tensor | None, tokenizer: Path | None) -> float | None:
        """Return the number of text bytes in all targets, which are tokens 1 to `target_tokens` of
        the set."""
        if token_bytes is None:
            entry, end, size = self.set.entry, self.target_tokens + 1, self.set.tokens
            if tokenizer is None:
                return None if entry is None else self.target_tokens * entry.bytes / entry.tokens
            decoder = open_tokenizer(tokenizer)
            if entry is None or end - 1 < size - end:
                return float(decoded_bytes(decoder, self.set.document_parts(1, end)))
            # Decode the tokens outside the targets, which are fewer, and subtract their bytes.
            rest = [*self.set.document_parts(0, 1), *self.set.document_parts(end, size)]
            return float(entry.bytes - decoded_bytes(decoder, rest))
        _, largest = self.set.token_range
        if largest >= len(token_bytes):
            raise DataError(
                f"token set {self.name}: token ids must be below the tokenizer's size of "
                f"{len(token_bytes)}, got {largest}"
            )
        lengths = token_bytes.numpy()
        blocks = self.set.blocks(1, self.target_tokens + 1)
        return float(sum(int(lengths[block].sum(dtype=np.int64)) for block in blocks))

    def bits_per_byte(self, loss: float) -> float | None:
        """Convert a mean loss in nats per token to bits per byte. Return None if the number of
        bytes is unknown."""
        if not self.target_bytes:
            return None
        return loss * self.counted_tokens / (math.log(2) * self.target_bytes)

    def micro_batches(self, *, micro_batch: int, data_size: int) -> int:
        """Return the number of micro-batches per rank."""
        return -(-self.samples // (micro_batch * data_size))

    def batches(
        self, *, micro_batch: int, data_rank: int, data_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one rank's micro-batches: tokens `[micro_batch, sequence_length + 1]` and weights.

        With document borders, tokens are `[micro_batch, 2, ...]` as in `TokenSet.sample`. The
        weights, float32 `[micro_batch]`, are 1 for windows to evaluate and 0 for copies of the last
        window that pad the last batch. Across ranks, every window has weight 1 exactly once.
        """
        for batch in range(self.micro_batches(micro_batch=micro_batch, data_size=data_size)):
            first = (batch * data_size + data_rank) * micro_batch
            indices = range(first, first + micro_batch)
            last = self.samples - 1
            windows = [self.set.sample(min(index, last), self.borders) for index in indices]
            weights = [float(index < self.samples) for index in indices]
            yield torch.from_numpy(np.stack(windows)), torch.tensor(weights)
