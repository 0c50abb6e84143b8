"""Export of a checkpoint as safetensors with our own names, for users of megatron-core."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from models.units import flat_shape
from scripts.data.folder import AtomicFolder
from scripts.huggingface.export import (
    DTYPES,
    Options,
    check_free,
    check_room,
    raise_problems,
    stored_dtype,
)
from scripts.huggingface.safetensors_file import write_shards
from training.checkpoint.checkpoints import CONFIG, CheckpointInfo, read_checkpoint
from training.checkpoint.weights import CheckpointWeights


def export_consolidated(source: Path, target: Path, options: Options) -> CheckpointInfo:
    """Write whole parameters and buffers to the new folder `target`; return their checkpoint.

    Shapes are megatron-core's on one rank; PC layers are merged. Raises InputError for a source or
    target that cannot be used.
    """
    check_free(target)
    info = read_checkpoint(source)
    raise_problems(info)
    weights = CheckpointWeights(info)
    weights.check()
    dtype = DTYPES[options.dtype or stored_dtype(info)]
    with torch.device("meta"):
        entries = {n: torch.empty(flat_shape(s), dtype=dtype) for n, s in weights.layouts().items()}
        entries |= {n: torch.empty(s) for n, s in weights.buffer_shapes().items()}
    check_room(target, sum(entry.nbytes for entry in entries.values()))
    with AtomicFolder(target, partial(check_free, target)) as folder:
        write_shards(folder.path, entries, _tensors(weights), options.shard_bytes)
        (folder.path / CONFIG).write_bytes((info.path / CONFIG).read_bytes())
        folder.commit()
    return info


def _tensors(weights: CheckpointWeights) -> Iterator[tuple[str, Tensor]]:
    layouts = weights.layouts()
    for name, layout in tqdm(layouts.items(), desc="writing", disable=None):
        yield name, weights.parameter(name, layout).view(flat_shape(layout))
    for name, shape in weights.buffer_shapes().items():
        yield name, weights.buffer(name, shape)
