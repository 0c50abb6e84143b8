"""Units, parameters and buffers of a pipeline stage, by names that are the same on any layout."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig
from models.families import FAMILIES
from models.layout import ChunkSpec, Layout
from models.units import Unit


def declare_stage_units(
    model: ModelConfig, chunks: Sequence[ChunkSpec], layout: Layout, **split: Any
) -> list[list[Unit]]:
    """Declare the units of each tensor-parallel rank of a stage, in forward order.

    `chunks` are the chunks of the stage's ranks, in forward order; `split` are further fields of
    `models.layout.Split`, such as this rank's `expert_rank`.
    """
    family = FAMILIES[model.family]
    split |= {"expert_size": layout.expert, "expert_tensor": layout.expert_tensor}
    return [
        [
            unit
            for chunk in chunks
            for unit in family.units(
                model, **vars(chunk), tensor_rank=rank, tensor_size=layout.tensor, **split
            )
        ]
        for rank in range(layout.tensor)
    ]


def units_of_domain(stage_units: Sequence[Sequence[Unit]], name: str) -> list[list[Unit]]:
    """Return the units of one domain, "dense" or "expert", of each tensor-parallel rank."""
    return [[unit for unit in units if unit.domain == name] for units in stage_units]


def named_parameters(
    names: Callable[[torch.nn.Module, Sequence[int]], dict[str, str]],
    modules: Sequence[torch.nn.Module],
    specs: Sequence[ChunkSpec],
) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of the chunks by declared global name."""
    parameters: dict[str, torch.nn.Parameter] = {}
    for module, spec in zip(modules, specs, strict=True):
        declared = names(module, spec.layers)
        for name, parameter in module.named_parameters():
            parameters[declared[name]] = parameter
    return parameters


def named_buffers(
    chunks: Iterable[torch.nn.Module], parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of the chunks' persistent buffers, which are equal on all ranks of a
    pipeline stage.

    The first part of a name is the name of a parameter of the same module:
    `layers.0.router.expert_bias`.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    for chunk in chunks:
        for module in chunk.modules():
            for name, value in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{names[id(next(module.parameters(recurse=False)))]}.{name}", value
