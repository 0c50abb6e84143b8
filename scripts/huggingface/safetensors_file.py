"""Safetensors files written tensor by tensor, so that a shard need never be in memory.

The library writes a file from all of its tensors at once. The format: eight bytes with the length
of a JSON header (type, shape and place of every tensor), the header, the tensors' bytes.
"""

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from training.errors import InputError

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return self.numel * self.dtype.itemsize


def shards(entries: Iterable[Entry], limit: int) -> list[list[Entry]]:
    """Return the entries, in order, in runs of at most `limit` bytes or of one larger tensor."""
    found: list[list[Entry]] = []
    size = 0
    for entry in entries:
        if not found or size + entry.bytes > limit:
            found.append([])
            size = 0
        found[-1].append(entry)
        size += entry.bytes
    return found


def write_shards(
    folder: Path, entries: Sequence[Entry], tensors: Iterable[tuple[str, Tensor]], limit: int
) -> None:
    """Write `tensors`, (name, value) in the order of `entries`, to model.safetensors or,
    where they have more than `limit` bytes, to several files and an index.

    Raises InputError for a value that is not finite in the type of its entry.
    """
    runs = shards(entries, limit)
    names = ["model.safetensors"]
    if len(runs) > 1:
        names = [f"model-{i + 1:05d}-of-{len(runs):05d}.safetensors" for i in range(len(runs))]
    stream = iter(tensors)
    for name, run in zip(names, runs, strict=True):
        with (folder / name).open("wb") as file:
            _write(file, run, lambda: next(stream))
    if len(runs) > 1:
        index = {
            "metadata": {
                "total_size": sum(entry.bytes for entry in entries),
                "total_parameters": sum(entry.numel for entry in entries),
            },
            "weight_map": {e.name: n for n, run in zip(names, runs, strict=True) for e in run},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _write(
    file: BinaryIO, run: Sequence[Entry], following: Callable[[], tuple[str, Tensor]]
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in run:
        place = [offset, offset + entry.bytes]
        kind = NAMES[entry.dtype]
        header[entry.name] = {"dtype": kind, "shape": list(entry.shape), "data_offsets": place}
        offset += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for entry in run:
        name, value = following()
        assert name == entry.name and tuple(value.shape) == entry.shape, (name, entry)
        content = value.to(entry.dtype)
        if not bool(content.isfinite().all()):
            kind, most = str(entry.dtype).removeprefix("torch."), torch.finfo(entry.dtype).max
            raise InputError(
                f"{name} must be at most {most:.6g} for {kind}, got {value.abs().max().item():.6g}"
            )
        file.write(content.contiguous().reshape(-1).view(torch.uint8).numpy().data)
