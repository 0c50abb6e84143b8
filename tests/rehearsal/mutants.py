"""Faults that a rehearsal must find: each function breaks the program of its process."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from models import dense
from parallel.comm import collectives
from parallel.optimizer.distributed_optimizer import DistributedOptimizer
from parallel.optimizer.owned_stacks import Streams
from parallel.storage.domain_model import DomainModel
from spectral.ieee_products import ieee_products
from training.data import batches
from training.rehearsal.program import put, replace
from training.step import Trainer


def no_wait_for_weights() -> None:
    """Forward passes begin before their weights have come."""
    put(DomainModel, "wait", lambda self, buckets: [self.gathers.pop(b, None) for b in buckets])


def no_wait_for_gradients() -> None:
    """The optimizer begins before gradients are reduced."""
    real = collectives.Pending.wait

    def wait(pending: collectives.Pending) -> None:
        if pending.kind != "reduce-scatter of gradients":
            real(pending)

    put(collectives.Pending, "wait", wait)


def unjoined(streams: Streams, items: Sequence[Any], **_: Any) -> Iterator[Any]:
    """What takes the place of `Streams.spread`."""
    for i, item in enumerate(items):
        with torch.cuda.stream(streams.streams[i % len(streams.streams)]):
            yield item


def streams_are_not_joined() -> None:
    """Work on side streams is not waited for."""
    put(Streams, "spread", unjoined)


def streams_do_not_wait() -> None:
    """Work on side streams begins before what it needs is there."""

    def spread(streams: Streams, items: Sequence[Any], **_: Any) -> Iterator[Any]:
        yield from unjoined(streams, items)
        for stream in streams.streams:
            torch.cuda.current_stream().wait_stream(stream)

    put(Streams, "spread", spread)


def host_looks_at_the_loss() -> None:
    """Every step waits for its loss."""
    real = Trainer.compute_gradients

    def compute_gradients(trainer: Trainer, index: int) -> torch.Tensor:
        loss = real(trainer, index)
        float(loss)
        return loss

    put(Trainer, "compute_gradients", compute_gradients)


def batches_are_pageable() -> None:
    """Batches come to the device from memory that the host waits for."""
    # A copy of pinned memory is pageable.
    replace(batches.on_device, lambda tensor, device: tensor.clone().to(device, non_blocking=True))


def pipelines_wait_for_the_device() -> None:
    """Megatron's own choice for sends of a pipeline."""
    real = dense.transformer_config

    def transformer_config(*arguments: Any, **options: Any) -> Any:
        config = real(*arguments, **options)
        config.batch_p2p_sync = True
        return config

    put(dense, "transformer_config", transformer_config)


def generators_are_not_seeded() -> None:
    """Megatron's tracker of random states as it comes, without the states that it asks for."""
    from megatron.core.tensor_parallel import random

    put(random, "initialize_rng_tracker", lambda *_, **__: None)
    random._CUDA_RNG_STATE_TRACKER = random.CudaRNGStatesTracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def loss_stays_on_the_host() -> None:
    """A tensor of the host in a collective of NCCL."""
    real = Trainer.mean_over_ranks

    def mean_over_ranks(trainer: Trainer, figures: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        torch.distributed.all_reduce(torch.zeros(1))
        return real(trainer, figures)

    put(Trainer, "mean_over_ranks", mean_over_ranks)


def norm_of_this_rank_alone() -> None:
    """One all-reduce is left out."""
    put(Trainer, "mean_over_ranks", lambda trainer, figures: torch.zeros((), device="cuda"))


def batches_stay_on_the_host() -> None:
    """Operands of two devices."""
    replace(batches.on_device, lambda tensor, device: tensor)


def step_reads_in_a_graph() -> None:
    """The optimizer reads a value where its step is recorded as a graph."""
    real = DistributedOptimizer.step

    def step(optimizer: DistributedOptimizer, *arguments: Any, **options: Any) -> Any:
        found = real(optimizer, *arguments, **options)
        torch.zeros(1, device="cuda").item()
        return found

    put(DistributedOptimizer, "step", step)


def user_wants_tf32() -> None:
    """The forward pass in TF32; nothing else may be."""
    torch.set_float32_matmul_precision("high")


def optimizer_in_tf32() -> None:
    """Products of the optimizer in the precision of the forward pass."""
    user_wants_tf32()
    replace(ieee_products, contextlib.nullcontext)
