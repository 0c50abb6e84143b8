"""Per-rank micro-batches: sampling, prefetching and transfer to the device."""

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from models.blocks.attention import documents_of
from models.layout import context_part
from parallel.comm.groups import Groups
from parallel.error_text import last_line
from parallel.model import Batch
from training.config import Config
from training.data.document_index import Borders
from training.data.order import Progress, TrainingData, Windows, batch_start
from training.errors import ConfigError, DataError

SHARED_MEMORY: Final = "/dev/shm"
AHEAD: Final = 2
"""Number of batches prefetched per worker, which is torch's default."""
SPARE_BYTES: Final = 1 << 20
"""Shared memory reserved for semaphores and other programs, in bytes."""


def training_batches(
    config: Config, groups: Groups, data: TrainingData, progress: Progress
) -> Iterator[torch.Tensor]:
    """Return an infinite iterator over this rank's micro-batches, starting at the position stored
    in `progress`.

    A micro-batch is int64 `[micro_batch, sequence_length + 1]`. With document borders, a
    micro-batch has the shape given in `training_loader`.
    """
    sampler = GlobalBatchSampler(
        consumed=progress.sample,
        global_batch=config.train.batch(progress.step, progress.tokens),
        micro_batch=config.train.micro_batch,
        data_rank=groups.data.rank,
        data_size=groups.data.size,
        left_out=progress.left_out,
    )
    present = data.at(progress.step).since(progress.phase)
    loader = training_loader(present, sampler, workers=config.data.workers)
    return without_worker_traces(loader)


def without_worker_traces(batches: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield `batches`. If a worker raises a DataError, strip the worker's traceback from the error
    message."""
    try:
        yield from batches
    except DataError as error:
        prefix = f"{DataError.__module__}.DataError: "
        raise DataError(last_line(error).removeprefix(prefix)) from error


@dataclass(frozen=True, kw_only=True)
class GlobalBatchSampler:
    """Yields an endless sequence of micro-batches for one data-parallel rank. A micro-batch is a
    list of sample indices.

    Global batch n starts at sample `consumed + n * global_batch`. If a global batch would contain
    samples in `left_out`, this batch and all later batches are shifted past these samples. Rank r
    reads the r-th part of each global batch and splits it into micro-batches, so the samples in a
    global batch depend on neither `data_size` nor `micro_batch`. The config checks ensure that
    `data_size * micro_batch` divides `global_batch`.
    """

    consumed: int  # samples used so far, across all ranks
    global_batch: int
    micro_batch: int
    data_rank: int
    data_size: int
    left_out: Windows = ()

    def __iter__(self) -> Iterator[list[int]]:
        share = self.global_batch // self.data_size
        batch = self.consumed
        while True:
            batch = batch_start(batch, self.global_batch, self.left_out)
            start = batch + self.data_rank * share
            for first in range(start, start + share, self.micro_batch):
                yield list(range(first, first + self.micro_batch))
            batch += self.global_batch


def training_loader(
    data: TrainingData, sampler: GlobalBatchSampler, *, workers: int
) -> DataLoader[Tensor]:
    """Return an infinite loader of a rank's micro-batches `[micro_batch, sequence_length + 1]`, or
    `[micro_batch, 2, sequence_length + 1]` with document borders.

    To resume, pass a sampler whose `consumed` is the number of samples used so far.

    Args:
        workers: number of prefetching processes; 0 loads batches in this process. The number of
            processes does not affect the order of batches.

    Raises:
        ConfigError: shared memory is too small for the batches prefetched by `workers`.
    """
    if workers:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        rows = sampler.micro_batch * (2 if data.borders.needed else 1)
        batch_bytes = rows * (data.sequence_length + 1) * 8
        needed = ranks * workers * (AHEAD + 1) * batch_bytes + SPARE_BYTES
        free = shutil.disk_usage(SHARED_MEMORY).free if os.path.isdir(SHARED_MEMORY) else needed
        if free < needed:
            raise ConfigError(
                f"data.workers = {workers} needs {needed / 2**20:.1f} MiB in {SHARED_MEMORY}, but "
                f"only {free / 2**20:.1f} MiB are free: start the container with a larger "
                "--shm-size, or set data.workers=0"
            )
    return DataLoader(
        data,
        batch_sampler=sampler,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        # DataLoader draws a seed when iteration starts. Give it its own generator, so that it does
        # not advance torch's default generator.
        generator=torch.Generator().manual_seed(0),
    )


def as_batch(
    window: Tensor, groups: Groups, borders: Borders, weight: Tensor | None = None
) -> Batch:
    """Turn token windows `[b, s + 1]`, or `[b, 2, s + 1]` with document borders, into a batch.

    The batch holds this context-parallel rank's inputs and next-token labels `[b, s / context]`, on
    the device. If the first tokens of documents are excluded from the loss, `counted` marks the
    labels to include.
    """
    move = partial(on_device, device=groups.device)
    context = {"rank": groups.context.rank, "size": groups.context.size}
    tokens, firsts = window.unbind(1) if borders.needed else (window, None)
    tokens = move(tokens)
    batch: Batch = {
        "tokens": context_part(tokens[:, :-1], 1, **context).contiguous(),
        "labels": context_part(tokens[:, 1:], 1, **context).contiguous(),
    }
    if firsts is not None and borders.mask:
        batch["documents"] = documents_of(firsts[:, :-1], move, **context)
    if firsts is not None and not borders.first_token_loss:
        mask = firsts[:, 1:] < torch.arange(1, firsts.shape[1])
        batch["counted"] = move(context_part(mask, 1, **context).contiguous())
    if weight is not None:
        batch["weight"] = move(weight)
    return batch


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy `tensor` to the device. A copy to a GPU uses pinned memory and does not block the
    host."""
    if device.type == "cuda" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
