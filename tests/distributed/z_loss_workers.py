"""Functions that the ranks run in the z-loss tests."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from models.layout import context_part
from parallel.comm import groups as process_groups
from parallel.comm.groups import Groups
from tests.distributed.workers import start, whole_gradients
from tests.models import tokens_of
from tests.stepped_models import assign_matrices, parallel_model
from tests.tiny_families import tiny_model
from training.step import mean_loss

SAMPLES, LENGTH = 4, 16


def gradients(layout: dict[str, int], cases: list[dict[str, Any]], z_loss: float) -> list[Any]:
    """For every case (`loss_chunk`, `micro_batch`), return the mean loss, the mean squared
    log-sum-exp, and the float64 gradients of one step of a model with capped logits."""
    groups = start(layout)
    found = [one_step(groups, z_loss, **case) for case in cases]
    process_groups.shutdown()
    return found


def one_step(
    groups: Groups, z_loss: float, *, loss_chunk: int | None, micro_batch: int
) -> dict[str, Any]:
    """Return the result of `gradients` for one case."""
    model = parallel_model(
        tiny_model("gemma2"), groups, assign_matrices("adamw"), sequence_length=LENGTH,
        loss_chunk=loss_chunk, z_loss=True,
    )  # fmt: skip
    place = {"rank": groups.context.rank, "size": groups.context.size}
    mine = [
        context_part(whole.chunk(groups.data.size)[groups.data.rank], 1, **place).split(micro_batch)
        for whole in tokens_of(SAMPLES, LENGTH, 60)
    ]
    batches = [{"tokens": t, "labels": y} for t, y in zip(*mine, strict=True)]
    model.zero_gradients()
    figures = model.forward_backward(
        lambda: iter(batches), partial(mean_loss, z_loss=z_loss), microbatches=len(batches),
        micro_batch=micro_batch, train=True,
    )  # fmt: skip
    means = sum((figure["loss"].double() for figure in figures), torch.zeros(2).double())
    for axis in (groups.pipeline, groups.context, groups.data):
        dist.all_reduce(means, group=axis.group)
    copies = groups.data.size * groups.context.size * len(batches)
    return {"means": means / copies, "gradients": whole_gradients(model)}
