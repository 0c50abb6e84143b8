"""Validation loss and multiple-choice task accuracy, computed by forward passes on any layout.

Each window of a validation set counts once. Each choice in a task is a separate sequence. Sequences
are distributed across data-parallel ranks, and grouped by length so that short sequences are not
padded to a full window. Causal attention hides the padding.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import lcm
from typing import Final

import torch
from torch import Tensor

from models.config import ModelConfig
from models.layout import Layout, context_chunks, context_part
from parallel.comm.collectives import MAX, all_reduce_
from parallel.comm.groups import Groups
from parallel.model import Batch, LossFunction, ParallelModel
from training.config import Config
from training.config.data import mean_weights
from training.config.schedule import TrainConfig
from training.data.batches import as_batch, on_device
from training.data.tasks import Request, Task, accuracies
from training.data.validation_data import ValidationData

PASSES = 32
"""A run checks for stop requests every `PASSES` * (pipeline size) micro-batches."""


class Interrupted(Exception):
    """Raised on all ranks if a stop request interrupts an evaluation."""


def evaluate(
    model: ParallelModel,
    groups: Groups,
    sets: Iterable[ValidationData],
    *,
    micro_batch: int,
    stop: Callable[[], bool],
    mixture: Mapping[str, float],
) -> dict[str, float]:
    """Return the metrics of all validation sets. All ranks get the same values.

    `val/<set>/loss` is in nats per token, `val/<set>/ppl` is the perplexity, and `val/<set>/bpb` is
    in bits per byte of text. `val/loss` and `val/bpb` are averages with the `mean_weights` of
    `mixture`, the weights of the training sets. All ranks call `stop` periodically, and raise
    Interrupted once `stop` returns True.
    """
    metrics: dict[str, float] = {}
    losses: dict[str, float] = {}
    densities: dict[str, float] = {}
    for each in sets:
        loss = mean_loss(model, groups, each, micro_batch=micro_batch, stop=stop)
        losses[each.name] = loss
        metrics[f"val/{each.name}/loss"] = loss
        metrics[f"val/{each.name}/ppl"] = math.exp(min(loss, 700.0))
        bits = each.bits_per_byte(loss)
        if bits is not None:
            metrics[f"val/{each.name}/bpb"] = densities[each.name] = bits
    if losses:
        weights = mean_weights(losses, mixture)
        metrics["val/loss"] = sum(weights[name] * loss for name, loss in losses.items())
        if densities.keys() == losses.keys():
            metrics["val/bpb"] = sum(weights[name] * bits for name, bits in densities.items())
    return metrics


def mean_loss(
    model: ParallelModel,
    groups: Groups,
    data: ValidationData,
    *,
    micro_batch: int,
    stop: Callable[[], bool],
) -> float:
    """Return the mean loss over the windows of `data` in nats per token."""
    shape = {"micro_batch": micro_batch, "data_size": groups.data.size}
    count = data.micro_batches(**shape)
    padded = whole_rounds(count, groups)
    sums = torch.zeros(2, dtype=torch.float64, device=groups.device)

    def batches() -> Iterator[Batch]:
        last: Tensor | None = None
        for window, weight in data.batches(**shape, data_rank=groups.data.rank):
            last = window
            yield as_batch(window, groups, data.borders, weight)
        for _ in range(padded - count):
            assert last is not None  # `count` is at least 1
            yield as_batch(last, groups, data.borders, torch.zeros(micro_batch))

    for figure in run_passes(
        model, groups, batches, weighted_sums, count=padded, micro_batch=micro_batch, stop=stop
    ):
        sums.add_(figure["sums"])
    all_reduce_(sums, groups.dense.replicas, model.comm_volume, "validation loss")
    # The sums are nonzero only on the last stage.
    all_reduce_(sums, groups.pipeline, model.comm_volume, "validation loss")
    return (sums[0] / sums[1]).item()


def whole_rounds(count: int, groups: Groups) -> int:
    """Round a number of micro-batches up to a multiple of the pipeline size, as the interleaved
    schedule requires."""
    return -(-count // groups.pipeline.size) * groups.pipeline.size


def run_passes(
    model: ParallelModel,
    groups: Groups,
    batches: Callable[[], Iterator[Batch]],
    loss: Callable[[Batch], LossFunction],
    *,
    count: int,
    micro_batch: int,
    stop: Callable[[], bool],
    length: int | None = None,
) -> Iterator[Mapping[str, Tensor]]:
    """Yield the metrics of each of `count` micro-batches. `count` must be a result of
    `whole_rounds`.

    For the other arguments, see `ParallelModel.forward_backward`. Raises Interrupted if `stop`
    returns True.
    """
    passes = PASSES * groups.pipeline.size
    # A stage with several chunks iterates over the batches once per chunk.
    streams = [batches() for _ in model.chunks]
    for first in range(0, count, passes):
        if stop():
            raise Interrupted
        remaining = iter(streams)
        yield from model.forward_backward(
            partial(next, remaining),
            loss,
            microbatches=min(passes, count - first),
            micro_batch=micro_batch,
            train=False,
            length=length,
        )


def weighted_sums(batch: Batch) -> LossFunction:
    """Return a loss function that computes the weighted sum of token losses and the sum of the
    weights."""

    def loss(token_losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        weights = batch["weight"][:, None].expand_as(token_losses).double()
        if "counted" in batch:
            weights = weights * batch["counted"]
        sums = torch.stack([(token_losses.double() * weights).sum(), weights.sum()])
        return token_losses.float().mean(), {"sums": sums}

    return loss


SHORTEST: Final = 16
"""Minimum length, in tokens, to which sequences are padded."""


def score(
    model: ParallelModel,
    groups: Groups,
    tasks: Sequence[Task],
    config: Config,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Return `task/<name>/acc` and `task/<name>/acc_norm` for each task, and their means over tasks
    as `task/acc` and `task/acc_norm`. All ranks get the same values.

    All ranks call `stop` periodically, and raise Interrupted once `stop` returns True.
    """
    assert config.model.vocab_size is not None  # `with_vocabulary` has replaced null
    likelihoods = log_likelihoods(
        model,
        groups,
        [request for task in tasks for request in task.requests],
        vocab_size=config.model.vocab_size,
        most_tokens=tokens_of_a_pass(config.train, config.model, groups),
        stop=stop,
    )
    metrics, start, rows = {}, 0, []
    for task in tasks:
        rows.append(accuracies(task, likelihoods[start : start + len(task.requests)]))
        metrics[f"task/{task.name}/acc"], metrics[f"task/{task.name}/acc_norm"] = rows[-1]
        start += len(task.requests)
    for key, values in zip(("acc", "acc_norm"), zip(*rows, strict=True), strict=True):
        metrics[f"task/{key}"] = sum(values) / len(values)
    return metrics


def tokens_of_a_pass(train: TrainConfig, model: ModelConfig, groups: Groups) -> float:
    """Return the number of tokens per pass at which logits take as much memory as during
    training."""
    rows = model.padded_vocab / groups.tensor.size
    share = 1.0 if train.loss_chunk is None else min(1.0, train.loss_chunk / rows)
    return share * train.micro_batch * train.sequence_length


def log_likelihoods(
    model: ParallelModel,
    groups: Groups,
    requests: Sequence[Request],
    *,
    vocab_size: int,
    most_tokens: float,
    stop: Callable[[], bool] = lambda: False,
) -> list[float]:
    """Return the log-probability in nats of each request's scored tokens, summed over tokens.

    `vocab_size` is the vocabulary size without padding. A pass contains at most `most_tokens`
    tokens, unless a single sequence is longer. For `stop`, see `score`.
    """
    window, by_length = model.sequence_length, dict[int, list[int]]()
    losses = torch.zeros(len(requests), dtype=torch.float64, device=groups.device)
    for index, request in enumerate(requests):
        length = next(n for n in lengths(groups.layout, window) if n >= len(request.tokens) - 1)
        by_length.setdefault(length, []).append(index)
    for length, indices in sorted(by_length.items()):
        share = -(-len(indices) // groups.data.size)
        rows = min(max(1, int(most_tokens / length)), share)
        count = whole_rounds(-(-share // rows), groups)
        for figure in run_passes(
            model,
            groups,
            partial(request_batches, groups, requests, indices, length, rows, count),
            partial(token_losses, model, groups, vocab_size),
            count=count,
            micro_batch=rows,
            stop=stop,
            length=length,
        ):
            losses.index_add_(0, figure["request"], figure["losses"])
    all_reduce_(losses, groups.dense.replicas, model.comm_volume, "scores of tasks")
    # The losses are nonzero only on the last stage.
    all_reduce_(losses, groups.pipeline, model.comm_volume, "scores of tasks")
    return losses.neg().cpu().tolist()


def lengths(layout: Layout, window: int) -> list[int]:
    """Return the lengths to which sequences are padded, in ascending order. The lengths are the
    window length divided by 1, 2, 4 and so on, as long as the result is at least `SHORTEST` and the
    layout can split sequences of this length."""
    context, found = layout.context, [window]
    pieces = lcm(2 * context if context > 1 else 1, context * layout.tensor)
    while found[0] % (2 * pieces) == 0 and found[0] // 2 >= SHORTEST:
        found.insert(0, found[0] // 2)
    return found


def request_batches(
    groups: Groups,
    requests: Sequence[Request],
    indices: Sequence[int],
    length: int,
    rows: int,
    count: int,
) -> Iterator[Batch]:
    """Yield this rank's `count` micro-batches of the requests with the given `indices`.

    A micro-batch contains `tokens` `[rows, length / context]`. For each scored token predicted on
    this context rank, the micro-batch also contains the flattened `position` of the logits, the
    `target` id and the index of the `request`.
    """
    data, context = groups.data, groups.context
    cut = {"rank": context.rank, "size": context.size}
    held = [position for chunk in context_chunks(length, **cut) for position in chunk]
    local = {position: i for i, position in enumerate(held)}
    for number in range(count):
        first = (number * data.size + data.rank) * rows
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        scored: list[tuple[int, int, int]] = []
        for row, index in enumerate(indices[first : first + rows]):
            request = requests[index]
            inputs, end = request.tokens[:-1], len(request.tokens) - 1
            tokens[row, :end] = torch.tensor(inputs)
            scored += (
                (row * len(held) + local[position], request.tokens[position + 1], index)
                for position in range(end - request.scored, end)
                if position in local
            )
        columns = torch.tensor(scored, dtype=torch.int64).view(-1, 3).unbind(1)
        batch = dict(zip(("position", "target", "request"), columns, strict=True))
        batch["tokens"] = context_part(tokens, 1, **cut)
        yield {key: on_device(value.contiguous(), groups.device) for key, value in batch.items()}


def token_losses(
    model: ParallelModel, groups: Groups, vocab_size: int, batch: Batch
) -> LossFunction:
    """Return a function that computes the losses of a micro-batch's scored tokens from logits
    `[rows, length / context, vocabulary / tensor]`. Padding rows of the vocabulary get probability
    0, because these rows are not tokens and are dropped on export."""
    tensor, comm_volume = groups.tensor, model.comm_volume

    def loss(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x = logits.flatten(0, 1)[batch["position"]].float()  # [scored, vocabulary / tensor]
        size = x.shape[1]
        here = torch.arange(size, device=x.device) + tensor.rank * size
        x = x.masked_fill(here >= vocab_size, -torch.inf)
        highest = all_reduce_(x.amax(1), tensor, comm_volume, "scores of tasks", MAX)
        target = batch["target"] - tensor.rank * size
        inside = (target >= 0) & (target < size)
        chosen = x.gather(1, target.clamp(0, size - 1)[:, None])[:, 0].where(inside, 0)
        sums = torch.stack(((x - highest[:, None]).exp().sum(1), chosen))
        total, chosen = all_reduce_(sums, tensor, comm_volume, "scores of tasks")
        losses = highest.double() + total.double().log() - chosen
        return logits.new_zeros(()), {"request": batch["request"], "losses": losses}

    return loss
