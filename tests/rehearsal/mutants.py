"""Faults that a rehearsal must find. Each function breaks the program in the current process."""

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
from training.rehearsal.program import put, replace_everywhere
from training.step import Trainer


def no_wait_for_weights() -> None:
    """Let forward passes start before their weights have arrived."""
    put(DomainModel, "wait", lambda self, buckets: [self.gathers.pop(b, None) for b in buckets])


def no_wait_for_gradients() -> None:
    """Let the optimizer start before gradients are reduced."""
    real = collectives.Pending.wait

    def wait(pending: collectives.Pending) -> None:
        if pending.kind != "reduce-scatter of gradients":
            real(pending)

    put(collectives.Pending, "wait", wait)


def unjoined(streams: Streams, items: Sequence[Any], **_: Any) -> Iterator[Any]:
    """Replace `Streams.spread`."""
    for i, item in enumerate(items):
        with torch.cuda.stream(streams.streams[i % len(streams.streams)]):
            yield item


def streams_are_not_joined() -> None:
    """Do not wait for work on side streams."""
    put(Streams, "spread", unjoined)


def streams_do_not_wait() -> None:
    """Start work on side streams before its inputs are ready."""

    def spread(streams: Streams, items: Sequence[Any], **_: Any) -> Iterator[Any]:
        yield from unjoined(streams, items)
        for stream in streams.streams:
            torch.cuda.current_stream().wait_stream(stream)

    put(Streams, "spread", spread)


def host_looks_at_the_loss() -> None:
    """Wait for the loss in every step."""
    real = Trainer.compute_gradients

    def compute_gradients(trainer: Trainer, index: int) -> torch.Tensor:
        loss = real(trainer, index)
        float(loss)
        return loss

    put(Trainer, "compute_gradients", compute_gradients)


def batches_are_pageable() -> None:
    """Copy batches to the device from pageable memory, for which the host waits."""
    # a clone of pinned memory is pageable
    replace_everywhere(
        batches.on_device, lambda tensor, device: tensor.clone().to(device, non_blocking=True)
    )


def pipelines_wait_for_the_device() -> None:
    """Use Megatron's default for pipeline sends, which waits for the device."""
    real = dense.transformer_config

    def transformer_config(*arguments: Any, **options: Any) -> Any:
        config = real(*arguments, **options)
        config.batch_p2p_sync = True
        return config

    put(dense, "transformer_config", transformer_config)


def generators_are_not_seeded() -> None:
    """Use Megatron's RNG tracker without the states that it requires."""
    from megatron.core.tensor_parallel import random

    put(random, "initialize_rng_tracker", lambda *_, **__: None)
    random._CUDA_RNG_STATE_TRACKER = random.CudaRNGStatesTracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def loss_stays_on_the_host() -> None:
    """Pass a host tensor to an NCCL collective."""
    real = Trainer.mean_over_ranks

    def mean_over_ranks(trainer: Trainer, figures: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        torch.distributed.all_reduce(torch.zeros(1))
        return real(trainer, figures)

    put(Trainer, "mean_over_ranks", mean_over_ranks)


def norm_of_this_rank_alone() -> None:
    """Leave out one all-reduce."""
    put(Trainer, "mean_over_ranks", lambda trainer, figures: torch.zeros((), device="cuda"))


def batches_stay_on_the_host() -> None:
    """Mix operands on two devices."""
    replace_everywhere(batches.on_device, lambda tensor, device: tensor)


def step_reads_in_a_graph() -> None:
    """Read a value in an optimizer step that is captured in a CUDA graph."""
    real = DistributedOptimizer.step

    def step(optimizer: DistributedOptimizer, *arguments: Any, **options: Any) -> Any:
        found = real(optimizer, *arguments, **options)
        torch.zeros(1, device="cuda").item()
        return found

    put(DistributedOptimizer, "step", step)


def user_wants_tf32() -> None:
    """Run the forward pass in TF32, which nothing else may use."""
    torch.set_float32_matmul_precision("high")


def optimizer_in_tf32() -> None:
    """Run the optimizer's matmuls in the precision of the forward pass."""
    user_wants_tf32()
    replace_everywhere(ieee_products, contextlib.nullcontext)
