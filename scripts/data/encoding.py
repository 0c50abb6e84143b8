"""Encode documents in order with several processes, and decode a sample of them as a check.
Workers import this module and the main script, so neither may import torch.
"""

import os
import signal
import traceback
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from os.path import commonprefix
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from scripts.command import counted
from scripts.data.sources import Position
from training.errors import DataError

_CHUNK_CHARACTERS = 1 << 18
DECODED: Final = 1000
ONE_IN: Final = 64
_CHUNKS_PER_WORKER = 4  # queued chunks: enough to keep workers busy without using much memory


@dataclass(frozen=True)
class Encoder:
    """A text encoder, given by the tokenizer file, the EOD token id and the token dtype."""

    path: Path
    eod_id: int
    dtype: str

    def encode(self, texts: list[str], sample: range = range(0)) -> "EncodedChunk":
        """Encode texts, append EOD to each, and decode those whose indices are in `sample`.

        Text that looks like a special token is encoded as plain text, so documents cannot forge an
        EOD.
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
    lengths: list[int]  # number of tokens in each document, including EOD
    bytes: list[int]  # UTF-8 size of each document
    # (original text, decoded text) for each sampled document
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
    """Process pool for encoding documents, started by the first call with more than one chunk.
    A single chunk is encoded in this process, as are all chunks if there is only one worker.

    On exit, the context manager shuts down the pool and unloads the tokenizer, because another
    tokenizer may later be written to the same path.

    Each worker process has its own pipe, served by a thread in the parent process. The workers of a
    ProcessPoolExecutor share a pipe, and it hangs if a worker is killed while writing a result.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._threads = ThreadPoolExecutor(count)
        self._processes: list[BaseProcess] = []
        self._idle: SimpleQueue[Connection[Any, Any]] = SimpleQueue()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
            process.join()
        self._threads.shutdown()
        _load.cache_clear()

    def encode(
        self, documents: Iterable[tuple[Position, str]], encoder: Encoder
    ) -> Generator[tuple[list[Position], EncodedChunk], None, None]:
        """Yield encoded documents with their positions, preserving their order."""
        chunks = _sampled(_chunked(documents))
        first = list(islice(chunks, 2))
        chunks = chain(first, chunks)
        if self.count == 1 or len(first) < 2:
            for positions, texts, sample in chunks:
                yield positions, encoder.encode(texts, sample)
            return
        pending: deque[tuple[list[Position], Future[EncodedChunk]]] = deque()
        try:
            for positions, texts, sample in chunks:
                if len(self._processes) < self.count:
                    self._start()
                future = self._threads.submit(self._encoded, encoder, texts, sample)
                pending.append((positions, future))
                if len(pending) >= self.count * _CHUNKS_PER_WORKER:
                    yield _result(pending)
            while pending:
                yield _result(pending)
        finally:
            for _, future in pending:
                future.cancel()

    def _start(self) -> None:
        """Start a worker process, and add the parent's end of its pipe to the idle pipes."""
        context = get_context("spawn")
        pipe, end = context.Pipe()
        process = context.Process(target=_work, args=(end,), daemon=True)
        process.start()
        end.close()  # so that the pipe is closed when the worker exits
        self._processes.append(process)
        self._idle.put(pipe)

    def _encoded(self, encoder: Encoder, texts: list[str], sample: range) -> EncodedChunk:
        """Encode texts in an idle process. Raises BrokenProcessPool if the process has died."""
        pipe = self._idle.get()
        try:
            pipe.send((encoder, texts, sample))
            result: EncodedChunk | Exception = pipe.recv()
        except (EOFError, OSError):
            raise BrokenProcessPool("a worker process has ended") from None
        finally:
            self._idle.put(pipe)
        if isinstance(result, Exception):
            raise result
        return result


def _result(
    pending: deque[tuple[list[Position], Future[EncodedChunk]]],
) -> tuple[list[Position], EncodedChunk]:
    positions, future = pending.popleft()
    return positions, future.result()


def _sampled(
    chunks: Iterable[tuple[list[Position], list[str]]],
) -> Iterator[tuple[list[Position], list[str], range]]:
    """Yield each chunk with the range of its texts to decode.

    Roughly the first `DECODED` texts are decoded, and after that one in `ONE_IN`.
    """
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


def _work(pipe: "Connection[Any, Any]") -> None:
    """Encode texts from a pipe until its other end is closed. Use one thread and ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with suppress(EOFError, OSError):  # raised once the parent process has exited
        while True:
            encoder, texts, sample = pipe.recv()
            try:
                result = encoder.encode(texts, sample)
            except Exception as error:
                error.add_note(traceback.format_exc())
                result = error
            pipe.send(result)


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
            if text != decoded:
                self.lost += 1
                self.example = self.example or _difference(text, decoded)

    def check(self, name: str, *, allowed: bool, final: bool = False) -> None:
        """Reject a tokenizer that changes text.

        Before `DECODED` documents are decoded, only a call with `final` checks.

        Raises:
            DataError: `allowed` is False and the fraction of changed documents exceeds `LARGEST`.
        """
        if allowed or not (final or self.decoded >= DECODED):
            return
        if self.lost > LARGEST * self.decoded:
            raise DataError(f"set {name}: {self}; use a lossless tokenizer, or pass --allow-lossy")

    def __str__(self) -> str:
        share, total = self.lost / max(1, self.decoded), counted(self.decoded, "decoded document")
        changed = f"the tokenizer changes the text of {share:.1%} of {total}"
        return f"{changed}, for example {self.example}"


def _difference(text: str, decoded: str) -> str:
    """Return excerpts from both texts around the first difference."""
    start = max(0, len(commonprefix([text, decoded])) - _CONTEXT // 2)
    pieces = [repr(each[start : start + 2 * _CONTEXT]) for each in (text, decoded)]
    return " for ".join(reversed(pieces))
