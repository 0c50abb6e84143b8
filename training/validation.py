"""Validation: the mean loss of each set, in which each window counts once on any layout."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from parallel.comm.collectives import all_reduce_
from parallel.comm.groups import Groups
from parallel.model import Batch, LossFunction, ParallelModel
from training.data.batches import as_batch
from training.data.validation_data import ValidationData

PASSES = 32
"""Number of micro-batches per pipeline rank between checks for stop requests."""


def evaluate(
    model: ParallelModel,
    groups: Groups,
    sets: Iterable[ValidationData],
    *,
    micro_batch: int,
    stop: Callable[[], bool] = lambda: False,
    mixture: Mapping[str, float] | None = None,
) -> dict[str, float] | None:
    """Return the metrics of all validation sets, equal on all ranks.

    `val/<set>/loss` is in nats per token, `val/<set>/ppl` is the perplexity, `val/<set>/bpb` is in
    bits per byte of text. `val/loss` and `val/bpb` are results of `mean_over_sets` with the weights
    `mixture` of the training sets. All ranks call `stop` at intervals; if it returns True, the
    result is None.
    """
    metrics: dict[str, float] = {}
    losses: dict[str, float] = {}
    densities: dict[str, float] = {}
    for each in sets:
        loss = mean_loss(model, groups, each, micro_batch=micro_batch, stop=stop)
        if loss is None:
            return None
        losses[each.name] = loss
        metrics[f"val/{each.name}/loss"] = loss
        metrics[f"val/{each.name}/ppl"] = math.exp(min(loss, 700.0))
        bits = each.bits_per_byte(loss)
        if bits is not None:
            metrics[f"val/{each.name}/bpb"] = densities[each.name] = bits
    if losses:
        metrics["val/loss"] = mean_over_sets(losses, mixture or {})
    if losses and densities.keys() == losses.keys():
        metrics["val/bpb"] = mean_over_sets(densities, mixture or {})
    return metrics


def mean_over_sets(values: Mapping[str, float], mixture: Mapping[str, float]) -> float:
    """Return the mean over validation sets, weighted like the training sets of the same names.

    If a training set of the same name is missing or has weight 0, the mean is not weighted.
    """
    named = all(mixture.get(name) for name in values)
    weights = {name: mixture[name] if named else 1.0 for name in values}
    return sum(weights[name] * value for name, value in values.items()) / sum(weights.values())


def mean_loss(
    model: ParallelModel,
    groups: Groups,
    data: ValidationData,
    *,
    micro_batch: int,
    stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Return the mean loss over the windows of `data` in nats per token, None if `stop` returned
    True."""
    shape = {"micro_batch": micro_batch, "data_size": groups.data.size}
    count = data.micro_batches(**shape)
    # The interleaved schedule needs a number of micro-batches divisible by the pipeline size.
    padded = -(-count // groups.pipeline.size) * groups.pipeline.size

    def batches() -> Iterator[Batch]:
        last: Tensor | None = None
        for window, weight in data.batches(**shape, data_rank=groups.data.rank):
            last = window
            yield as_batch(window, groups, data.borders, weight)
        for _ in range(padded - count):
            assert last is not None  # `count` is at least 1
            yield as_batch(last, groups, data.borders, torch.zeros(micro_batch))

    # A stage of several chunks iterates over the batches once per chunk.
    streams = [batches() for _ in model.chunks]
    sums = torch.zeros(2, dtype=torch.float64, device=groups.device)
    passes = PASSES * groups.pipeline.size
    for first in range(0, padded, passes):
        if stop():
            return None
        remaining = iter(streams)
        figures = model.forward_backward(
            partial(next, remaining),
            weighted_sums,
            microbatches=min(passes, padded - first),
            micro_batch=micro_batch,
            train=False,
        )
        for figure in figures:
            sums += figure["sums"]
    all_reduce_(sums, groups.dense.replicas, model.comm_volume, "validation loss")
    # Only the last stage has figures.
    all_reduce_(sums, groups.pipeline, model.comm_volume, "validation loss")
    return (sums[0] / sums[1]).item()


def weighted_sums(batch: Batch) -> LossFunction:
    """Return the loss function that computes the weighted sum of token losses and the sum of
    weights."""

    def loss(token_losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        weights = batch["weight"][:, None].expand_as(token_losses).double()
        if "counted" in batch:
            weights = weights * batch["counted"]
        sums = torch.stack([(token_losses.double() * weights).sum(), weights.sum()])
        return token_losses.float().mean(), {"sums": sums}

    return loss
