"""Encode documents in order with several threads, and decode a sample of them as a check."""

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from os.path import commonprefix
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from scripts.command import counted
from scripts.data.sources import Position
from training.data.token_bytes import open_tokenizer
from training.errors import DataError

_CHUNK_CHARACTERS = 1 << 18
DECODED: Final = 1000
ONE_IN: Final = 64
_CHUNKS_PER_THREAD = 4  # queued chunks: enough to keep threads busy without using much memory


@dataclass(frozen=True)
class Encoder:
    """A text encoder, given by the tokenizer file, the EOD token id and the token dtype."""

    path: Path
    eod_id: int
    dtype: str

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which never truncates texts and releases Python's global lock while
        encoding."""
        tokenizer = open_tokenizer(self.path)
        tokenizer.encode_special_tokens = True
        return tokenizer

    def encode(self, texts: list[str], sample: range = range(0)) -> "EncodedChunk":
        """Encode texts and append EOD to each text. Decode the texts with indices in `sample`.

        Text that looks like a special token is encoded as plain text, so documents cannot forge an
        EOD.
        """
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        documents = [[*encoding.ids, self.eod_id] for encoding in encodings]
        return EncodedChunk(
            tokens=np.concatenate([np.array(each, dtype=self.dtype) for each in documents]),
            lengths=[len(each) for each in documents],
            bytes=[len(text.encode("utf-8")) for text in texts],
            decoded=[
                (texts[i], self.tokenizer.decode(encodings[i].ids, skip_special_tokens=False))
                for i in sample
            ],
        )


@dataclass(frozen=True)
class EncodedChunk:
    """The tokens of consecutive documents."""

    tokens: NDArray[np.integer]  # `[sum(lengths)]`
    lengths: list[int]  # number of tokens in each document, including EOD
    bytes: list[int]  # UTF-8 size of each document
    # (original text, decoded text) for each sampled document
    decoded: list[tuple[str, str]] = field(default_factory=list)

    def documents(self) -> Iterator[tuple[NDArray[np.integer], int]]:
        """Yield the tokens and the UTF-8 size of each document."""
        pieces = np.split(self.tokens, np.cumsum(self.lengths)[:-1])
        yield from zip(pieces, self.bytes, strict=True)


def encoded(
    documents: Iterable[tuple[Position, str]], encoder: Encoder, threads: int
) -> Generator[tuple[list[Position], EncodedChunk], None, None]:
    """Yield encoded documents with their positions, in the original order.

    Roughly the first `DECODED` documents are also decoded, then one of every `ONE_IN` documents.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a thread encodes its chunk on one core

    def submitted() -> Iterator[tuple[list[Position], Future[EncodedChunk]]]:
        done = 0
        for positions, texts in _chunked(documents):
            step = 1 if done < DECODED else ONE_IN
            sample = range(-done % step, len(texts), step)
            done += len(texts)
            yield positions, pool.submit(encoder.encode, texts, sample)

    with ThreadPoolExecutor(threads) as pool:
        try:
            chunks = submitted()
            pending = deque(islice(chunks, threads * _CHUNKS_PER_THREAD))
            while pending:
                positions, future = pending.popleft()
                yield positions, future.result()
                pending.extend(islice(chunks, 1))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _chunked(
    documents: Iterable[tuple[Position, str]],
) -> Iterator[tuple[list[Position], list[str]]]:
    positions: list[Position] = []
    texts: list[str] = []
    size = 0
    for position, text in documents:
        positions.append(position)
        texts.append(text)
        size += len(text)
        if size >= _CHUNK_CHARACTERS:
            yield positions, texts
            positions, texts, size = [], [], 0
    if texts:
        yield positions, texts


LARGEST: Final = 0.01
"""Maximum fraction of decoded documents that may differ from the original text."""
_CONTEXT: Final = 20


@dataclass
class RoundTrip:
    """Number of decoded documents in a set, and how many of them differ from the original text."""

    decoded: int = 0
    lost: int = 0
    example: str = ""

    def add(self, other: "RoundTrip") -> None:
        """Add the documents counted by `other`."""
        self.decoded += other.decoded
        self.lost += other.lost
        self.example = self.example or other.example

    def count(self, chunk: EncodedChunk) -> None:
        """Count the decoded documents of a chunk."""
        for text, decoded in chunk.decoded:
            self.decoded += 1
            if text == decoded:
                continue
            self.lost += 1
            if not self.example:  # excerpts from both texts around the first difference
                start = max(0, len(commonprefix([text, decoded])) - _CONTEXT // 2)
                before, after = (
                    repr(each[start : start + 2 * _CONTEXT]) for each in (text, decoded)
                )
                self.example = f"{after} for {before}"

    def check(self, name: str, *, allowed: bool, final: bool = False) -> None:
        """Reject a tokenizer that changes text.

        Do nothing until `DECODED` documents have been decoded, unless `final` is set.

        Raises:
            DataError: `allowed` is False and the fraction of changed documents exceeds `LARGEST`.
        """
        if allowed or not (final or self.decoded >= DECODED):
            return
        if self.lost > LARGEST * self.decoded:
            raise DataError(
                f"token set {name}: {self}; use a lossless tokenizer, or pass --allow-lossy"
            )

    def __str__(self) -> str:
        share, total = self.lost / max(1, self.decoded), counted(self.decoded, "decoded document")
        changed = f"the tokenizer changes the text of {share:.1%} of {total}"
        return f"{changed}, for example {self.example}"
