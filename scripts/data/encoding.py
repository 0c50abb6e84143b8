"""Encoding of documents in several processes, in order. Some documents are decoded as a check.
Workers import this module and the main script, so neither of them imports torch.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from os.path import commonprefix
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from scripts.command import counted
from scripts.data.sources import Position
from training.errors import DataError

_CHUNK_CHARACTERS = 1 << 18
DECODED: Final = 1000
ONE_IN: Final = 64
_CHUNKS_PER_WORKER = 4  # queued chunks: enough to keep workers busy, few enough to limit memory


@dataclass(frozen=True)
class Encoder:
    """An encoder of texts: tokenizer file, EOD token id and dtype of the tokens."""

    path: Path
    eod_id: int
    dtype: str

    def encode(self, texts: list[str], sample: range = range(0)) -> "EncodedChunk":
        """Encode texts, append EOD to each, and decode the texts whose indices are in `sample`.

        Text that looks like a special token is encoded as plain text, so a document cannot contain
        a forged EOD.
        """
        tokenizer = _load(self.path)
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        documents = [[*encoding.ids, self.eod_id] for encoding in encodings]
        return EncodedChunk(
            tokens=np.concatenate([np.array(each, dtype=self.dtype) for each in documents]),
            lengths=[len(each) for each in documents],
            bytes=[len(text.encode("utf-8")) for text in texts],
            decoded=[
                (texts[i], tokenizer.decode(encodings[i].ids, skip_special_tokens=False))
                for i in sample
            ],
        )


@dataclass(frozen=True)
class EncodedChunk:
    """The tokens of consecutive documents."""

    tokens: NDArray[np.integer]  # `[sum(lengths)]`
    lengths: list[int]  # number of tokens of each document, including EOD
    bytes: list[int]  # UTF-8 size of each document
    # (original text, decoded text) of each sampled document
    decoded: list[tuple[str, str]] = field(default_factory=list)

    def documents(self) -> Iterator[tuple[NDArray[np.integer], int]]:
        """Yield the tokens and the UTF-8 size of each document."""
        pieces = np.split(self.tokens, np.cumsum(self.lengths)[:-1])
        yield from zip(pieces, self.bytes, strict=True)


@lru_cache(maxsize=1)
def _load(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


class Workers:
    """Pool of processes that encode documents, started at the first call with more than one chunk.
    A single chunk, or with one worker every chunk, is encoded in this process.

    The context manager ends the processes at exit and unloads the tokenizer, because another
    tokenizer may later be written to the same path.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ProcessPoolExecutor(
            count, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker
        )

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        _load.cache_clear()

    def encode(
        self, documents: Iterable[tuple[Position, str]], encoder: Encoder
    ) -> Generator[tuple[list[Position], EncodedChunk], None, None]:
        """Yield encoded documents with their positions, in the documents' order."""
        chunks = _sampled(_chunked(documents))
        few = list(islice(chunks, 2))
        chunks = chain(few, chunks)
        if self.count == 1 or len(few) < 2:
            for positions, texts, sample in chunks:
                yield positions, encoder.encode(texts, sample)
            return
        waiting: deque[tuple[list[Position], Future[EncodedChunk]]] = deque()
        try:
            for positions, texts, sample in chunks:
                waiting.append((positions, self._pool.submit(encoder.encode, texts, sample)))
                if len(waiting) >= self.count * _CHUNKS_PER_WORKER:
                    yield _result(waiting)
            while waiting:
                yield _result(waiting)
        finally:
            for _, future in waiting:
                future.cancel()


def _result(
    waiting: deque[tuple[list[Position], Future[EncodedChunk]]],
) -> tuple[list[Position], EncodedChunk]:
    positions, future = waiting.popleft()
    return positions, future.result()


def _sampled(
    chunks: Iterable[tuple[list[Position], list[str]]],
) -> Iterator[tuple[list[Position], list[str], range]]:
    """Yield chunks with the range of texts to decode: about the first `DECODED` texts, then one in
    `ONE_IN`."""
    done = 0
    for positions, texts in chunks:
        step = 1 if done < DECODED else ONE_IN
        yield positions, texts, range(-done % step, len(texts), step)
        done += len(texts)


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


def _start_worker() -> None:
    """Make the worker ignore Ctrl-C, use one thread, and exit when its parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


LARGEST: Final = 0.01
"""Largest allowed share of decoded documents that differ from the original text."""
_AROUND: Final = 20


@dataclass
class RoundTrip:
    """Counts of a set's decoded documents and of those that differ from the original text."""

    decoded: int = 0
    lost: int = 0
    example: str = ""

    def add(self, chunk: EncodedChunk) -> None:
        """Add the counts of a chunk."""
        for text, decoded in chunk.decoded:
            self.decoded += 1
            if text != decoded:
                self.lost += 1
                self.example = self.example or _difference(text, decoded)

    def check(self, name: str, *, allowed: bool, final: bool = False) -> None:
        """Reject a tokenizer that changes text. Check only after `DECODED` documents or if `final`.

        Raises:
            DataError: `allowed` is False and the share of changed documents exceeds `LARGEST`.
        """
        if allowed or not (final or self.decoded >= DECODED):
            return
        if self.lost > LARGEST * self.decoded:
            raise DataError(f"set {name}: {self}; use a lossless tokenizer, or pass --allow-lossy")

    def __str__(self) -> str:
        share, of = self.lost / max(1, self.decoded), counted(self.decoded, "decoded document")
        return f"the tokenizer changes the text of {share:.1%} of {of}, for example {self.example}"


def _difference(text: str, decoded: str) -> str:
    """Return excerpts of both texts around the first difference."""
    start = max(0, len(commonprefix([text, decoded])) - _AROUND // 2)
    pieces = [repr(each[start : start + 2 * _AROUND]) for each in (text, decoded)]
    return " for ".join(reversed(pieces))
