"""Encode documents on several processes, in order.

Workers import this module, so it does not import torch.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

_CHUNK_CHARACTERS = 1 << 18
_CHUNKS_PER_WORKER = 4  # enough to keep workers busy, few enough to bound memory


@dataclass(frozen=True)
class Encoder:
    """What a worker needs to encode: the tokenizer's file, its EOD and the integer type."""

    path: Path
    eod_id: int
    dtype: str

    def encode(self, texts: list[str]) -> "EncodedChunk":
        """Encode texts, each ended by EOD.

        Text that looks like a special token is encoded as plain text, so that no document can
        forge the end of a document.
        """
        encodings = _load(self.path).encode_batch(texts, add_special_tokens=False)
        documents = [[*encoding.ids, self.eod_id] for encoding in encodings]
        return EncodedChunk(
            tokens=np.concatenate([np.array(each, dtype=self.dtype) for each in documents]),
            lengths=[len(each) for each in documents],
            bytes=[len(text.encode("utf-8")) for text in texts],
        )


@dataclass(frozen=True)
class EncodedChunk:
    """The tokens of some consecutive documents."""

    tokens: NDArray[np.integer]  # `[sum(lengths)]`
    lengths: list[int]  # tokens of each document, EOD included
    bytes: list[int]  # UTF-8 bytes of each document

    def documents(self) -> Iterator[tuple[NDArray[np.integer], int]]:
        """Yield (tokens, bytes of text) of each document."""
        pieces = np.split(self.tokens, np.cumsum(self.lengths)[:-1])
        yield from zip(pieces, self.bytes, strict=True)


@lru_cache(maxsize=1)
def _load(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode_documents(
    documents: Iterable[str], encoder: Encoder, workers: int
) -> Generator[EncodedChunk, None, None]:
    """Yield the encoded documents in order, whatever the number of workers.

    With one worker this process encodes.
    """
    chunks = _chunked(documents)
    if workers == 1:
        yield from map(encoder.encode, chunks)
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
    )
    try:
        waiting: deque[Future[EncodedChunk]] = deque()
        for chunk in chunks:
            waiting.append(pool.submit(encoder.encode, chunk))
            if len(waiting) >= workers * _CHUNKS_PER_WORKER:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _chunked(documents: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for text in documents:
        chunk.append(text)
        size += len(text)
        if size >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _start_worker() -> None:
    """Make a worker ignore Ctrl-C, use one thread and end with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
