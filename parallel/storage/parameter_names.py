"""What a rank's modules hold, by the names that every layout gives it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from parallel.comm.groups import Stage


def named_parameters(
    names: Callable[[torch.nn.Module, Sequence[int]], dict[str, str]],
    modules: Sequence[torch.nn.Module],
    parts: Sequence[Stage],
) -> dict[str, torch.nn.Parameter]:
    """Every parameter of the chunks under its declared, global name."""
    found: dict[str, torch.nn.Parameter] = {}
    for module, part in zip(modules, parts, strict=True):
        declared = names(module, part.layers)
        for name, parameter in module.named_parameters():
            found[declared[name]] = parameter
    return found


def named_buffers(
    chunks: Iterable[torch.nn.Module], parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The persistent buffers of modules, which all ranks of a pipeline stage have alike, by the
    name of the parameter beside which they are: `layers.0.router.expert_bias`."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for chunk in chunks:
        for module in chunk.modules():
            for name, value in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{names[id(next(module.parameters(recurse=False)))]}.{name}", value
