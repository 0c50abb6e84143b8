"""Parameters and buffers of a rank's modules by their global names, the same on any layout."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from models.layout import ChunkSpec


def named_parameters(
    names: Callable[[torch.nn.Module, Sequence[int]], dict[str, str]],
    modules: Sequence[torch.nn.Module],
    specs: Sequence[ChunkSpec],
) -> dict[str, torch.nn.Parameter]:
    """Parameters of the chunks by declared global name."""
    parameters: dict[str, torch.nn.Parameter] = {}
    for module, spec in zip(modules, specs, strict=True):
        declared = names(module, spec.layers)
        for name, parameter in module.named_parameters():
            parameters[declared[name]] = parameter
    return parameters


def named_buffers(
    chunks: Iterable[torch.nn.Module], parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Persistent buffers of the chunks, which are equal on all ranks of a pipeline stage.

    The name is made from that of the parameter beside it: `layers.0.router.expert_bias`.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    for chunk in chunks:
        for module in chunk.modules():
            for name, value in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{names[id(next(module.parameters(recurse=False)))]}.{name}", value
