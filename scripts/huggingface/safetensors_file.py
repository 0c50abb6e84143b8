"""Writing safetensors files of bounded size, one at a time, with an index."""

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from training.errors import InputError

INDEX_FILE = "model.safetensors.index.json"


def shards(entries: Iterable[tuple[str, Tensor]], limit: int) -> list[dict[str, Tensor]]:
    """Group consecutive tensors into files of at most `limit` bytes; a larger tensor has its own
    file."""
    runs: list[dict[str, Tensor]] = []
    size = 0
    for name, entry in entries:
        if not runs or size + entry.nbytes > limit:
            runs.append({})
            size = 0
        runs[-1][name] = entry
        size += entry.nbytes
    return runs


def write_shards(
    folder: Path, entries: dict[str, Tensor], tensors: Iterable[tuple[str, Tensor]], limit: int
) -> None:
    """Write `tensors` to model.safetensors, or, above `limit` bytes, to several files and an index.

    `tensors` yields (name, value) in the order of `entries`, whose meta-device tensors have the
    shapes and dtypes to write. One file is in memory at a time. Raises InputError if a value is not
    finite in its entry's dtype, or if a file cannot be written.
    """
    runs = shards(entries.items(), limit)
    names = ["model.safetensors"]
    if len(runs) > 1:
        names = [f"model-{i + 1:05d}-of-{len(runs):05d}.safetensors" for i in range(len(runs))]
    stream = iter(tensors)
    for file, run in zip(names, runs, strict=True):
        content = {name: cast(name, value, run[name]) for name, value in islice(stream, len(run))}
        assert content.keys() == run.keys(), file
        try:
            save_file(content, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise InputError(f"{folder / file} cannot be written: {error}") from None
    if len(runs) > 1:
        index = {
            "metadata": {
                "total_size": sum(entry.nbytes for entry in entries.values()),
                "total_parameters": sum(entry.numel() for entry in entries.values()),
            },
            "weight_map": {t: file for file, run in zip(names, runs, strict=True) for t in run},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def cast(name: str, value: Tensor, entry: Tensor) -> Tensor:
    """Return `value` in the dtype of `entry`. Raises InputError if the result is not finite."""
    assert value.shape == entry.shape, name
    content = value.to(entry.dtype, copy=True, memory_format=torch.contiguous_format)
    if not bool(content.isfinite().all()):
        kind, most = str(entry.dtype).removeprefix("torch."), torch.finfo(entry.dtype).max
        raise InputError(
            f"{name} must be at most {most:.6g} for {kind}, got {value.abs().max().item():.6g}"
        )
    return content
