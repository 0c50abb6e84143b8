"""What the ranks of the context-parallel tests run: a model on process groups, no optimizer."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank

from models.config import ModelConfig
from models.context import context_part
from models.engine import accepts
from models.families import FAMILIES
from models.initialize import initialize_
from models.units import Unit, check_coverage
from parallel.comm import groups as process_groups
from tests.families import SHAPE, model_of
from tests.models import tokens_of

LENGTH = 16


def losses_and_gradients(
    models: dict[str, dict[str, Any]], tensor: int = 1, context: int = 1, sequence: bool = False
) -> dict[str, dict[str, Any]]:
    """Mean loss over the batch and float64 gradient of every whole unit, for every model.

    The gradient of a unit is the mean over context ranks. One that is `partial_over_tensor`, and
    that of a gain under sequence parallelism, is summed over tensor ranks.
    """
    process_groups.initialize(tensor=tensor, context=context)
    found = {name: one_model(model, sequence) for name, model in models.items()}
    process_groups.shutdown()
    return found


def one_model(model: dict[str, Any], sequence: bool) -> dict[str, Any]:
    """Mean loss and whole gradients of one model on the present groups."""
    config = model_of({**SHAPE, "vocab_size": 64, **model})
    group = context_group()
    chunk, units, parameters = build(config, sequence)
    place = {"rank": group.rank(), "size": group.size()}
    batch = dict(zip(("tokens", "labels"), tokens_of(3, LENGTH, 64), strict=True))
    tokens, labels = (context_part(x, 1, **place) for x in batch.values())
    newer = {"is_hybrid_cp": False} if accepts(get_batch_on_this_cp_rank, "is_hybrid_cp") else {}
    theirs = get_batch_on_this_cp_rank(batch, cp_group=group, **newer)
    assert torch.equal(tokens, theirs["tokens"])
    loss = chunk(tokens, torch.zeros_like(tokens), None, labels=labels).mean()
    loss.backward()
    gradients = {}
    for unit in units:
        summed = unit.partial_over_tensor or (unit.replicated and sequence)
        gradients[unit.name] = whole_gradient(unit, parameters[unit.parameter], summed)
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=group)
    return {"loss": mean / place["size"], "gradients": gradients}


def build(
    config: ModelConfig, sequence: bool
) -> tuple[torch.nn.Module, list[Unit], dict[str, torch.nn.Parameter]]:
    """The initialised model of this rank, its units, and its parameters by declared name."""
    family = FAMILIES[config.family]
    place = {
        "tensor_rank": parallel_state.get_tensor_model_parallel_rank(),
        "tensor_size": parallel_state.get_tensor_model_parallel_world_size(),
    }
    engine = family.transformer_config(
        config,
        dtype=torch.float64,
        tensor_size=place["tensor_size"],
        context_size=context_group().size(),
        sequence_parallel=sequence,
    )
    layers = range(config.layers)
    chunk = family.build(
        config, engine, layers=layers, embedding=True, head=True, sequence_length=LENGTH
    )
    names = family.parameter_names(chunk, layers)
    parameters = {names[name]: parameter for name, parameter in chunk.named_parameters()}
    units = family.units(config, layers=layers, **place)
    check_coverage(units, parameters)
    initialize_(parameters, units, config.init, seed=7, layers=config.layers, **place)
    return chunk, units, parameters


def context_group() -> dist.ProcessGroup:
    """The ranks that share a sequence."""
    return parallel_state.get_context_parallel_group()


def whole_gradient(unit: Unit, parameter: torch.nn.Parameter, summed: bool) -> torch.Tensor:
    """Gradient `[*unit.shape]`: the mean over context ranks, whole over tensor ranks."""
    piece = unit.view(parameter.grad).contiguous()
    context, tensor = context_group(), parallel_state.get_tensor_model_parallel_group()
    dist.all_reduce(piece, group=context)
    piece /= context.size()
    if summed:
        dist.all_reduce(piece, group=tensor)
    if unit.shard_axis is None:
        return piece.reshape(unit.shape)
    pieces = [torch.empty_like(piece) for _ in range(tensor.size())]
    dist.all_gather(pieces, piece, group=tensor)
    return torch.cat(pieces, unit.shard_axis).reshape(unit.shape)
