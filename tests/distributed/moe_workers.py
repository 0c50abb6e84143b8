"""What the ranks of the mixture-of-experts tests run."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

from models.context import context_part
from models.load_balance import balance_, max_violation, token_counts
from parallel.comm import groups as process_groups
from tests.models import tokens_of
from tests.moe_models import build, model_with

SAMPLES, LENGTH = 4, 16


def loss_and_gradients(layout: dict[str, int], moe: dict[str, Any]) -> dict[str, Any]:
    """Mean loss over all ranks, every unit's gradient of it, and the tokens per expert.

    Gradients are reduced as a trainer must: summed over the copies of a parameter and divided by
    the number of data-parallel ranks, and under sequence parallelism also summed over the tensor
    ranks if a parameter is replicated. Of a cut unit, this rank's piece is returned. Balancing
    losses count as Megatron's schedules count them.
    """
    groups = process_groups.initialize(**layout)
    chunk, units, parameters = build(model_with(**moe), groups)
    place = {"rank": groups.context.rank, "size": groups.context.size}
    tokens, labels = (
        context_part(x.chunk(groups.data.size)[groups.data.rank], 1, **place)
        for x in tokens_of(SAMPLES, LENGTH, 60)
    )
    positions = torch.zeros_like(tokens)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(float(groups.context.size)))
    loss = chunk(tokens, positions, None, labels=labels).mean()
    loss.backward()
    mean = loss.detach() / groups.dense.replicas.size
    dist.all_reduce(mean, group=groups.dense.replicas.group)
    gradients, place_of, shapes = {}, {}, {}
    for unit in units:
        domain = groups.experts if unit.domain == "expert" else groups.dense
        place_of[unit.name] = domain.tensor.rank
        shapes[unit.name] = unit.local_axes(domain.tensor.size)
        gradient = unit.view(parameters[unit.parameter].grad).contiguous() / domain.divisor
        dist.all_reduce(gradient, group=domain.replicas.group)
        if unit.replicated and groups.tensor.size > 1:
            dist.all_reduce(gradient, group=groups.tensor.group)
        gradients[unit.name] = gradient
    counts = token_counts([chunk])
    dist.all_reduce(counts, group=groups.dense.stage.group)
    balance_([chunk], counts, rate=0.1)
    result = {
        "loss": mean,
        "gradients": gradients,
        "cut": {unit.name: unit.shard_axis for unit in units if unit.shard_axis is not None},
        "shapes": shapes,
        "counts": counts,
        "max_violation": max_violation(counts),
        "bias": [layer.mlp.router.expert_bias for layer in chunk.decoder.layers[1:]],
        "place_of": place_of,
    }
    process_groups.shutdown()
    return result
