"""Functions that the ranks run in the gradient tests."""

from typing import Any

import torch
import torch.distributed as dist

from models.blocks.experts import balance_, layer_numbers, routers, token_counts
from models.layout import context_part
from parallel.comm import groups as process_groups
from parallel.comm.groups import Groups
from parallel.optimizer.distributed_optimizer import build_optimizer
from tests.distributed.workers import start, whole_gradients
from tests.models import tokens_of
from tests.stepped_models import assign_matrices, figures_of, parallel_model
from tests.tiny_families import SHAPE, model_of

SAMPLES, LENGTH = 4, 16


def losses_and_gradients(
    layout: dict[str, int], models: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the mean loss, the float64 gradients and the expert loads of one step for every
    model."""
    groups = start(layout)
    results = {name: one_step(model, groups) for name, model in models.items()}
    process_groups.shutdown()
    return results


def one_step(settings: dict[str, Any], groups: Groups) -> dict[str, Any]:
    """Return the mean loss over the batch, the gradients of whole units on this rank, the norm of
    all gradients, and each expert's token count and bias by layer."""
    config, assign = model_of({**SHAPE, **settings}), assign_matrices("adamw")
    model = parallel_model(config, groups, assign, sequence_length=LENGTH)
    batch = {
        name: context_part(
            whole.chunk(groups.data.size)[groups.data.rank],
            1,
            rank=groups.context.rank,
            size=groups.context.size,
        )
        for name, whole in zip(("tokens", "labels"), tokens_of(SAMPLES, LENGTH, 60), strict=True)
    }
    for router in routers(model.chunks):
        if router.earlier_load is not None:  # unequal shares, as equal shares give no gradient
            router.earlier_load.copy_(torch.arange(len(router.earlier_load)).square())
    model.zero_gradients()
    figures = figures_of(model, batch)
    norm = build_optimizer(model, assign).clip(None).total
    loss = sum((figure["loss"].double() for figure in figures), torch.zeros(()).double())
    for axis in (groups.pipeline, groups.context, groups.data):
        dist.all_reduce(loss, group=axis.group)
    counts = token_counts(model.chunks)
    dist.all_reduce(counts, group=groups.dense.stage.group)
    balance_(model.chunks, counts, rate=0.1)
    layers = layer_numbers(model.chunks)
    biases = [router.expert_bias for router in routers(model.chunks)]
    for router, load in zip(routers(model.chunks), counts, strict=True):
        assert router.earlier_load is None or torch.equal(router.earlier_load, load)
    return {
        "loss": loss.item() / (groups.data.size * groups.context.size),
        "gradients": whole_gradients(model),
        "norm": norm.item(),
        "counts": dict(zip(layers, counts, strict=True)),
        "bias": dict(zip(layers, biases, strict=True)),
    }
