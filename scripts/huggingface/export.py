"""Export a checkpoint to a Hugging Face model folder, or to safetensors with Spectrain's names.

At most one parameter and one weight file are in memory at a time. A tensor above the file size
limit is written to its own file, which may be in memory as well.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from models.config import ModelConfig
from models.huggingface.architectures import InexpressibleError
from models.huggingface.config_json import architecture, config_json
from models.huggingface.tensors import their_tensors
from models.units import flat_shape
from scripts.command import check_free
from scripts.data.folder import AtomicFolder
from scripts.data.text_tokenizer import PreparedTokenizer
from scripts.huggingface.card import card
from scripts.huggingface.tokenizer_files import find_tokenizer
from training.checkpoint.checkpoints import not_finite, problems, read_checkpoint
from training.checkpoint.stored_checkpoint import CONFIG, CheckpointInfo, CheckpointWeights
from training.errors import BrokenCheckpointError, InputError
from training.report.text import progress, short

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
SPARE_BYTES = 64 << 20
"""Disk space to reserve for all files other than weights, in bytes."""


def export(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: Path | None = None,
    without_tokenizer: bool = False,
    verify: Callable[[CheckpointWeights, Path], object] | None = None,
) -> CheckpointInfo:
    """Export a checkpoint to a new Hugging Face model folder `target`. Return the checkpoint.

    Raises InputError if the source, the model or the target cannot be used.

    Args:
        source: run folder or checkpoint folder.
        target: new folder, which is only created after `verify(weights, folder)` returns.
        dtype: weight dtype, the training precision by default.
        shard_bytes: maximum size per weight file.
        tokenizer: tokenizer file or folder, the run's tokenizer by default.
        without_tokenizer: whether to omit the tokenizer.
        verify: checks the folder and aborts the export by raising an error.
    """
    info, weights = opened(source)
    model = weights.config.model
    try:
        name = architecture(model).name
    except InexpressibleError as error:
        raise InputError(str(error)) from None
    prepared = None if without_tokenizer else find_tokenizer(info, tokenizer)
    dtype = dtype or stored_dtype(info)
    # Buffers are always float32.
    kinds = {True: torch.float32, False: DTYPES[dtype]}
    entries = {
        t.name: torch.empty(t.shape, dtype=kinds[t.buffer], device="meta")
        for t in their_tensors(model)
    }
    tensors = their_weights(weights, model)
    with new_folder(target, entries, tensors, shard_bytes) as folder:
        write_settings(folder, weights, prepared, dtype)
        included = prepared is not None
        text = card(info, name=target.name, architecture=name, dtype=dtype, tokenizer=included)
        (folder / "README.md").write_text(text, encoding="utf-8")
        if verify is not None:
            verify(weights, folder)
    return info


def opened(source: Path) -> tuple[CheckpointInfo, CheckpointWeights]:
    """Return a checkpoint and its weights, after checking that it is intact."""
    info = read_checkpoint(source)
    raise_problems(info)
    return info, CheckpointWeights(info)


@contextmanager
def new_folder(
    target: Path, entries: dict[str, Tensor], tensors: Iterable[tuple[str, Tensor]], limit: int
) -> Iterator[Path]:
    """Yield a folder with weight files (see `write_shards`). The folder becomes `target` if the
    context exits without an error."""
    check_room(target, sum(entry.nbytes for entry in entries.values()))
    with AtomicFolder(target, partial(check_free, target)) as folder:
        write_shards(folder.path, entries, tensors, limit)
        yield folder.path
        folder.commit()


def check_room(target: Path, needed: int) -> None:
    """Raise InputError if there is no disk space at `target` for `needed` bytes of weights."""
    existing = target.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed + SPARE_BYTES:
        raise InputError(
            f"target {target} requires {(needed + SPARE_BYTES) / 1e9:.2f} GB of disk space, got "
            f"{free / 1e9:.2f} GB"
        )


def raise_problems(info: CheckpointInfo) -> None:
    """Raise BrokenCheckpointError if any file is damaged or any tensor is not finite."""
    number, files = 0, len(info.files)
    with progress(lambda: f"{info.path.name}: {number} of {files} files checked"):
        for number in range(files):
            for problem in problems(info, slice(number, number + 1)):
                raise BrokenCheckpointError(problem)
    with progress(lambda: f"{info.path.name}: checking that all values are finite"):
        for problem in not_finite(info):
            raise BrokenCheckpointError(problem)


def stored_dtype(info: CheckpointInfo) -> str:
    """Return the name of the training dtype. For imported weights, return the name of the stored
    dtype."""
    if info.imported:
        return str(info.meta["dtype"])
    return PRECISIONS[info.config.train.precision]


def their_weights(weights: CheckpointWeights, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, float32 value) for every exported tensor in order, loading one parameter at a
    time."""
    tensors = their_tensors(model)
    done, total = 0, short(sum(tensor.numel for tensor in tensors))
    with progress(lambda: f"{short(done)} of {total} parameters written"):
        for name, group in groupby(tensors, key=lambda tensor: tensor.parameter):
            parts = list(group)
            if parts[0].buffer:
                value = weights.buffer(name, parts[0].view_shape)
            else:
                value = weights.parameter(name)
            for part in parts:
                done += part.numel
                yield part.name, part.take(value)


def write_settings(
    folder: Path, weights: CheckpointWeights, tokenizer: PreparedTokenizer | None, dtype: str
) -> None:
    """Write config.json, generation_config.json and the tokenizer files."""
    end = None if tokenizer is None else tokenizer.entry.eod_id
    config = weights.config
    settings = config_json(
        config.model, dtype=dtype, positions=config.train.sequence_length, end_token=end
    )
    generation = {
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": end,
        "do_sample": False,
    }
    for name, content in (("config.json", settings), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for name, data in ({} if tokenizer is None else tokenizer.files).items():
        (folder / name).write_bytes(data)


def export_consolidated(
    source: Path, target: Path, *, dtype: str | None = None, shard_bytes: int = SHARD_BYTES
) -> CheckpointInfo:
    """Write unsharded parameters and buffers to a new folder `target`. Return the checkpoint.

    For `dtype` and `shard_bytes`, see `export`. Tensors have the shapes that megatron-core uses on
    a single rank. PC layers are merged into the weights. Raises InputError if the source or target
    cannot be used.
    """
    info, weights = opened(source)
    kind = DTYPES[dtype or stored_dtype(info)]
    with torch.device("meta"):
        entries = {n: torch.empty(flat_shape(s), dtype=kind) for n, s in weights.layouts().items()}
        entries |= {n: torch.empty(s) for n, s in weights.buffer_shapes().items()}
    with new_folder(target, entries, _tensors(weights), shard_bytes) as folder:
        (folder / CONFIG).write_bytes((info.path / CONFIG).read_bytes())
    return info


def _tensors(weights: CheckpointWeights) -> Iterator[tuple[str, Tensor]]:
    layouts = weights.layouts()
    done = 0
    with progress(lambda: f"{done} of {len(layouts)} parameters written"):
        for name, layout in layouts.items():
            yield name, weights.parameter(name).view(flat_shape(layout))
            done += 1
    for name, shape in weights.buffer_shapes().items():
        yield name, weights.buffer(name, shape)


def write_shards(
    folder: Path, entries: dict[str, Tensor], tensors: Iterable[tuple[str, Tensor]], limit: int
) -> None:
    """Write `tensors` to model.safetensors or, above `limit` bytes, to several files and an index.

    `tensors` yields (name, value) in the order of `entries`, whose meta tensors define the shapes
    and dtypes to write. A tensor above `limit` gets its own file, which may be in memory along with
    one other file. Raises InputError if a value is not finite in the target dtype, or if a file
    cannot be written.
    """
    split = split_torch_state_dict_into_shards(
        entries, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    contents: dict[str, dict[str, Tensor]] = {file: {} for file in split.filename_to_tensors}
    for name, value in tensors:
        file = split.tensor_to_filename[name]
        contents[file][name] = cast(name, value, entries[name])
        if len(contents[file]) == len(split.filename_to_tensors[file]):
            try:
                save_file(contents.pop(file), folder / file, metadata={"format": "pt"})
            except SafetensorError as error:
                raise InputError(f"{folder / file} cannot be written: {error}") from None
    assert not contents, contents.keys()
    if split.is_sharded:
        parameters = sum(entry.numel() for entry in entries.values())
        index = {
            "metadata": {**split.metadata, "total_parameters": parameters},
            "weight_map": split.tensor_to_filename,
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def cast(name: str, value: Tensor, entry: Tensor) -> Tensor:
    """Return `value` in the dtype of `entry`. Raises InputError if the result is not finite."""
    assert value.shape == entry.shape, name
    content = value.to(entry.dtype, copy=True, memory_format=torch.contiguous_format)
    if not bool(content.isfinite().all()):
        kind, most = str(entry.dtype).removeprefix("torch."), torch.finfo(entry.dtype).max
        raise InputError(
            f"{name} must be at most {most:.6g} in magnitude for {kind}, got "
            f"{value.abs().max().item():.6g}"
        )
    return content
