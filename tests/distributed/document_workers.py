"""Functions that the ranks run in the tests of document masking."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.blocks.attention import documents_of
from models.layout import context_part
from models.pc_config import PCConfig
from parallel.comm import groups as process_groups
from parallel.comm.groups import Groups
from parallel.model import Batch, LossFunction, ParallelModel
from parallel.observe.activations import ActivationWatch
from tests.distributed.workers import start, whole_gradients
from tests.models import tokens_of
from tests.stepped_models import assign_matrices, parallel_model
from tests.tiny_families import SHAPE, model_of

LENGTH = 16
DOCUMENTS = [[1, 5, 10], [1] * LENGTH, [LENGTH], [7, 1, 8]]
"""Lengths of the documents in each sequence."""


def firsts() -> Tensor:
    """Return the start of each token's document `[sequences, LENGTH]`."""
    rows = []
    for lengths in DOCUMENTS:
        begins = torch.tensor(starts_of(lengths))
        rows.append(begins.repeat_interleave(torch.tensor(lengths)))
    return torch.stack(rows)


def starts_of(lengths: list[int]) -> list[int]:
    """Return the start positions of documents with these lengths."""
    return [sum(lengths[:i]) for i in range(len(lengths))]


def weights_of(model: ParallelModel, vocabulary: int) -> Tensor:
    """Return the weight of each logit in the loss, `[sequences, LENGTH, vocabulary]`."""
    generator = torch.Generator().manual_seed(1)
    shape = len(DOCUMENTS), LENGTH, vocabulary
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def results(
    layout: dict[str, int], models: dict[str, dict[str, Any]], *, packed: bool, **options: Any
) -> dict[str, dict[str, Any]]:
    """Return the logits and gradients of every model, for documents packed into shared sequences
    (`packed`) or, in one process, for separate documents."""
    groups = start(layout)
    run = of_packed if packed else of_each
    found = {
        name: run(build(name, model, groups, options), groups) for name, model in models.items()
    }
    process_groups.shutdown()
    return found


def build(
    name: str, settings: dict[str, Any], groups: Groups, options: dict[str, Any]
) -> ParallelModel:
    """Build a model with the given settings, and with PC layers if its name contains "PC"."""
    if "PC" in name:
        options = options | {"pc": PCConfig(level=2, evaluator="in_graph")}
    config = model_of({**SHAPE, **settings})
    assign = assign_matrices("adamw")
    return parallel_model(config, groups, assign, sequence_length=LENGTH, **options)


def weighted_sum(batch: Batch) -> LossFunction:
    """Return a loss function that returns the weighted sum of the logits, and the logits."""
    return lambda logits: ((logits * batch["weights"]).sum(), {"logits": logits.detach().clone()})


def of_packed(model: ParallelModel, groups: Groups) -> dict[str, Any]:
    """Return the results for documents packed into shared sequences."""
    place = {"rank": groups.context.rank, "size": groups.context.size}
    tensor, data = groups.tensor, groups.data

    def own(whole: Tensor) -> Tensor:
        return context_part(whole.chunk(data.size)[data.rank], 1, **place).contiguous()

    whole = weights_of(model, model.chunks[-1].vocab_size)
    batch: Batch = {
        "tokens": own(tokens_of(len(DOCUMENTS), LENGTH, 60)[0]),
        "documents": documents_of(firsts().chunk(data.size)[data.rank], Tensor.clone, **place),
        "weights": own(whole).chunk(tensor.size, 2)[tensor.rank] * groups.dense.replicas.size,
    }
    model.zero_gradients()
    watch = ActivationWatch(model, groups, (), inputs=False, attention=True)
    figures = model.forward_backward(
        lambda: iter([batch]),
        weighted_sum,
        microbatches=1,
        micro_batch=len(batch["tokens"]),
        train=True,
    )
    watch.stop()
    return {
        "place": (data.rank, groups.context.rank, tensor.rank),
        "logits": [figure["logits"] for figure in figures],
        "gradients": whole_gradients(model),
        "scores": watch.blocks(),
    }


def of_each(model: ParallelModel, groups: Groups) -> dict[str, Any]:
    """Return the results for separate documents, in one process."""
    weights = weights_of(model, model.chunks[-1].vocab_size)
    tokens = tokens_of(len(DOCUMENTS), LENGTH, 60)[0]
    pieces = [
        (row, begin, begin + length)
        for row, lengths in enumerate(DOCUMENTS)
        for begin, length in zip(starts_of(lengths), lengths, strict=True)
    ]

    def batches() -> Iterator[Batch]:
        for row, begin, end in pieces:
            # Megatron divides the loss by the number of micro-batches.
            yield {
                "tokens": tokens[row : row + 1, begin:end],
                "weights": weights[row : row + 1, begin:end] * len(pieces),
            }

    model.zero_gradients()
    run = partial(model.forward_backward, batches, weighted_sum, micro_batch=1, train=True)
    logits = torch.empty_like(weights)
    watch = ActivationWatch(model, groups, (), inputs=False, attention=True)
    for (row, begin, end), figure in zip(pieces, run(microbatches=len(pieces)), strict=True):
        logits[row, begin:end] = figure["logits"][0]
    watch.stop()
    return {"logits": logits, "gradients": whole_gradients(model), "scores": watch.blocks()}
