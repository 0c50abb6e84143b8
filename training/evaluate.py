"""Validation: the mean loss of every named set, each window counted once on any layout."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from models.context import context_part
from parallel.collectives import all_reduce_
from parallel.groups import Groups
from parallel.model import LossFunction, ParallelModel
from training.data import ValidationData


def evaluate(
    model: ParallelModel, groups: Groups, sets: Iterable[ValidationData], *, micro_batch: int
) -> dict[str, float]:
    """`val/<set>/loss` (nats per token), `.../ppl`, `.../bpb` (bits per byte of text) of every set,
    and `val/loss`, the mean of their losses. The same on every rank."""
    metrics: dict[str, float] = {}
    losses = []
    for each in sets:
        loss = mean_loss(model, groups, each, micro_batch=micro_batch)
        losses.append(loss)
        metrics[f"val/{each.name}/loss"] = loss
        metrics[f"val/{each.name}/ppl"] = math.exp(min(loss, 700.0))
        bits = each.bits_per_byte(loss)
        if bits is not None:
            metrics[f"val/{each.name}/bpb"] = bits
    if losses:
        metrics["val/loss"] = sum(losses) / len(losses)
    return metrics


def mean_loss(
    model: ParallelModel, groups: Groups, data: ValidationData, *, micro_batch: int
) -> float:
    """Mean loss per token over the windows of `data`, in nats."""
    shape = {"micro_batch": micro_batch, "data_size": groups.data.size}
    count = data.micro_batches(**shape)
    # The interleaved schedule takes micro-batches in multiples of the pipeline size.
    padded = -(-count // groups.pipeline.size) * groups.pipeline.size

    def batches() -> Iterator[dict[str, Tensor]]:
        last = None
        for window, weight in data.batches(**shape, data_rank=groups.data.rank):
            last = window
            yield as_batch(window, groups, weight)
        for _ in range(padded - count):
            yield as_batch(last, groups, torch.zeros(micro_batch))

    figures = model.run(
        batches, weighted_sums, microbatches=padded, micro_batch=micro_batch, train=False
    )
    sums = torch.zeros(2, dtype=torch.float64, device=groups.device)
    for figure in figures:
        sums += figure["sums"]
    all_reduce_(sums, groups.dense.replicas, model.traffic, "validation loss")
    # Only the last stage has figures.
    all_reduce_(sums, groups.pipeline, model.traffic, "validation loss")
    return (sums[0] / sums[1]).item()


def as_batch(window: Tensor, groups: Groups, weight: Tensor | None = None) -> dict[str, Tensor]:
    """Inputs and next-token labels `[b, s / context]` of token windows `[b, s + 1]`: this context
    rank's part of the sequence, on the device."""
    window = window.to(groups.device, non_blocking=True)
    place = {"rank": groups.context.rank, "size": groups.context.size}
    batch = {
        "tokens": context_part(window[:, :-1], 1, **place).contiguous(),
        "labels": context_part(window[:, 1:], 1, **place).contiguous(),
    }
    if weight is not None:
        batch["weight"] = weight.to(groups.device)
    return batch


def weighted_sums(batch: dict[str, Tensor]) -> LossFunction:
    """Loss function that collects (sum of token losses, number of tokens) of counted windows."""

    def loss(token_losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        weights = batch["weight"][:, None].expand_as(token_losses).double()
        sums = torch.stack([(token_losses.double() * weights).sum(), weights.sum()])
        return token_losses.float().mean(), {"sums": sums}

    return loss
