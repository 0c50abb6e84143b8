"""Shards of a preparation. A shard holds encoded documents; one process joins shards into sets.

OUTPUT.shards/K-of-N/ contains `tokens.bin`, `documents` (one record per document), the tokenizer,
and `shard.json` with per-input document and token counts.
"""

import json
import re
from collections.abc import Generator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np

from scripts.data.encoding import EncodedChunk, RoundTrip
from scripts.data.plan import Preparation
from scripts.data.set_writer import RECORD, read_records
from scripts.data.sources import BLOCK, SHARD_FILE, Position, Shard, shards_folder
from scripts.data.text_tokenizer import TOKENIZER_FILE
from training.data.hashes import file_sha256
from training.errors import DataError, InputError
from training.json_file import read_json

TOKENS_FILE: Final = "tokens.bin"
RECORDS_FILE: Final = "documents"
_NAME: Final = re.compile(r"(\d+)-of-(\d+)")


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """The contents of shard.json, which describes a shard's folder.

    key      identifies the preparation, the shard and the contents of the inputs it reads
    dtype    token dtype
    parts    (documents, tokens) for each input, in order, keyed by index in the preparation
    left     (first, end) ranges of inputs that the shard left unfinished
    decoded  statistics of the documents decoded, by set name
    sha256   hashes of the token and record files
    """

    key: str
    dtype: str
    parts: dict[str, list[int]]
    left: list[list[int]]
    decoded: dict[str, dict[str, Any]]
    sha256: dict[str, str]

    def write(self, folder: Path) -> None:
        """Write the entry to a shard's folder."""
        (folder / SHARD_FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of the token and record files in a shard's folder."""
    return {name: file_sha256(folder / name) for name in (TOKENS_FILE, RECORDS_FILE)}


def shard_key(preparation: Preparation, shard: Shard, identities: list[str]) -> str:
    """Return the key of a shard (see `ShardEntry`).

    `identities` are the identities of all inputs. Only inputs that the shard reads affect the key.
    """
    kept = [each if shard.owns(i, None) else "" for i, each in enumerate(identities)]
    return f"{preparation.fingerprint(kept)} {shard.number + 1}/{shard.count}"


def read_entry(folder: Path) -> ShardEntry | None:
    """Return a shard's entry, or None if the shard is unfinished.

    Raises DataError if the entry is from another version of this program.
    """
    try:
        return ShardEntry(**read_json(folder / SHARD_FILE))
    except FileNotFoundError:
        return None
    except TypeError:
        rule = "is from another version; delete the folder and prepare the shard again"
        raise DataError(f"{folder / SHARD_FILE} {rule}") from None


@dataclass(frozen=True)
class _Part:
    """The documents of one input in a shard's files.

    The first document has index `document`, and its first token has index `token`.
    """

    folder: Path
    dtype: str
    document: int
    token: int
    documents: int
    finished: bool  # whether the shard encoded all of its documents from this input


class Shards:
    """Reads a preparation's shards and yields their documents in input order.

    Raises:
        InputError: a shard is missing or belongs to another preparation.
        DataError: the shards have different tokenizers, or a shard is damaged.
    """

    def __init__(self, preparation: Preparation, output: Path, identities: list[str]) -> None:
        counts = {int(match[2]) for match in shard_names(output)}
        home = shards_folder(output)
        if len(counts) != 1:
            raise InputError(
                f"all shards in {home} must have the same N (--shard K/N), got {sorted(counts)}"
            )
        self._shards = [preparation.shard(i, max(counts)) for i in range(max(counts))]
        self.folders = [shard.folder(output) for shard in self._shards]
        entries = [read_entry(folder) for folder in self.folders]
        missing = [f.name for f, entry in zip(self.folders, entries, strict=True) if entry is None]
        if missing:
            raise InputError(
                f"{home} is missing {', '.join(missing)}: prepare the missing shards (--shard "
                f"{missing[0].replace('-of-', '/')} ...), or delete the folder to prepare the data "
                "without shards"
            )
        self._parts: list[dict[int, _Part]] = []
        self.decoded: dict[str, RoundTrip] = {}
        for folder, shard, entry in zip(self.folders, self._shards, entries, strict=True):
            assert entry is not None
            if entry.key != shard_key(preparation, shard, identities):
                raise InputError(
                    f"{folder} was made from different inputs or options; prepare the shard again "
                    "with --overwrite, or delete the folder"
                )
            self._parts.append(_parts(folder, entry, shard, len(identities)))
            for name, values in entry.decoded.items():
                self.decoded.setdefault(name, RoundTrip()).add(RoundTrip(**values))
        tokenizers = {file_sha256(folder / TOKENIZER_FILE) for folder in self.folders}
        if len(tokenizers) != 1:
            raise DataError(
                f"all shards in {home} must have the same tokenizer, got {len(tokenizers)} "
                "tokenizers; prepare the shards again with --overwrite"
            )

    def documents(
        self, unit: int, skip: int
    ) -> Generator[tuple[list[Position], EncodedChunk], None, int | None]:
        """Yield the documents of input `unit` in chunks, starting at document `skip`.

        Each chunk is yielded with the position after each of its documents. `unit` is the index of
        the input in the preparation. The generator stops at the first document that is in no shard
        and returns the index of this document, or None if the shards contain all documents of the
        input.
        """
        parts = [
            documents[unit]
            for shard, documents in zip(self._shards, self._parts, strict=True)
            if shard.owns(unit, None)
        ]
        read = [0] * len(parts)  # tokens read from each part
        done = 0
        for block in count():
            turn, first = block % len(parts), block // len(parts) * BLOCK
            part = parts[turn]
            size = max(0, min(BLOCK, part.documents - first))
            records = read_records(part.folder / RECORDS_FILE, part.document + first, size)
            lengths = records["tokens"].astype(np.int64)
            begin = max(0, skip - done)
            if begin < size:
                token = part.token + read[turn] + int(lengths[:begin].sum())
                tokens = np.fromfile(
                    part.folder / TOKENS_FILE,
                    part.dtype,
                    int(lengths[begin:].sum()),
                    offset=token * np.dtype(part.dtype).itemsize,
                )
                yield (
                    [Position(unit, done + i + 1) for i in range(begin, size)],
                    EncodedChunk(
                        tokens=tokens,
                        lengths=lengths[begin:].tolist(),
                        bytes=records["bytes"][begin:].tolist(),
                    ),
                )
            read[turn] += int(lengths.sum())
            done += size
            if size < BLOCK:
                return None if part.finished else done
        raise AssertionError


def _parts(folder: Path, entry: ShardEntry, shard: Shard, units: int) -> dict[int, _Part]:
    """Return a shard's part of each input. Raises DataError if the shard's files are damaged."""
    parts, document, token = {}, 0, 0
    left = {unit for first, end in entry.left for unit in range(first, end)}
    for unit in range(units):
        if not shard.owns(unit, None):
            continue
        documents, tokens = entry.parts.get(str(unit), (0, 0))
        parts[unit] = _Part(folder, entry.dtype, document, token, documents, unit not in left)
        document, token = document + documents, token + tokens
    size = (folder / TOKENS_FILE).stat().st_size
    if size != token * np.dtype(entry.dtype).itemsize or (folder / RECORDS_FILE).stat().st_size != (
        document * RECORD.itemsize
    ):
        raise DataError(
            f"{folder} is damaged: its files have the wrong sizes; delete the folder and prepare "
            "the shard again"
        )
    if entry.sha256 != hashes(folder):
        raise DataError(
            f"{folder} is damaged or from an earlier version: its files do not match the sha256 in "
            f"{SHARD_FILE}; delete the folder and prepare the shard again"
        )
    return parts


def shard_names(output: Path) -> list[re.Match[str]]:
    """Return the folder names of a preparation's shards, including unfinished shards, as matches of
    `_NAME`."""
    home = shards_folder(output)
    paths = home.iterdir() if home.is_dir() else ()
    return [match for path in paths if (match := _NAME.match(path.name))]
