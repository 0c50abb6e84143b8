"""Enumerates a model's trainable weights and their layers, in model order."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from torch import nn
from torch.nn.utils import parametrize

CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
RENAMED = ("weight", "weight_g", "weight_v", "weight_orig")
"""Names of a layer's weight: the usual name, and the names under weight_norm and spectral_norm."""


class Weight(NamedTuple):
    """A trainable parameter and its location in the model.

    name        full name of the parameter
    module      module that holds the parameter or the parametrized weight computed from it
    own         name of the parameter in `module`
    path        (name, module) pairs from `module` outward to the whole model, whose name is ""
    """

    name: str
    parameter: nn.Parameter
    module: nn.Module
    own: str
    path: tuple[tuple[str, nn.Module], ...]

    @property
    def is_layer(self) -> bool:
        """Whether this is the weight of a layer rather than a bare parameter."""
        return self.own in RENAMED

    @property
    def own_name(self) -> str:
        """The name that indicates the weight's use: the layer's name or, for a bare parameter,
        `own`."""
        return self.path[0][0] if self.is_layer else self.own

    @property
    def around(self) -> nn.Module:
        """The module that defines `own_name`."""
        return self.path[:2][-1][1] if self.is_layer else self.module


def pattern_of(name: str) -> str:
    """Return a pattern that matches a parameter's name in each of the repeated layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def listed(problems: Mapping[str, str], most: int = 10) -> str:
    """Format each parameter's name and problem as a line. Repeated layers share a line."""
    groups = defaultdict[tuple[str, str], list[str]](list)
    for name, problem in problems.items():
        groups[pattern_of(name), problem].append(name)
    shown = [*groups.items()][:most]
    lines = [
        (f"{len(names)} x {pattern}" if len(names) > 1 else names[0]) + f": {problem}"
        for (pattern, problem), names in shown
    ]
    left = len(problems) - sum(len(names) for _, names in shown)
    return "\n".join([*lines, *[f"... and {left} more"] * (left > 0)])


def kind_of(module: nn.Module) -> str:
    """Return a module's class name, without the prefixes added by FSDP2 and parametrizations."""
    return type(module).__name__.removeprefix("FSDP").removeprefix("Parametrized")


def is_embedding(module: nn.Module) -> bool:
    """Return whether a module's outputs are rows of its weight."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def weights_of(model: nn.Module) -> Iterator[Weight]:
    """Yield every trainable parameter once, in model order.

    A parameter shared with an embedding is yielded as the embedding's weight.
    """
    modules = dict(model.named_modules())
    order = sorted(modules.items(), key=lambda item: not is_embedding(item[1]))
    owners: dict[int, tuple[str, str]] = {}
    for prefix, owner in order:
        for own, parameter in owner.named_parameters(recurse=False):
            owners.setdefault(id(parameter), (prefix, own))
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        prefix, own = owners[id(parameter)]
        parts = prefix.split(".") if prefix else []
        if parts[-2:-1] == ["parametrizations"] and own.startswith("original"):
            *parts, _, own = parts  # x.parametrizations.weight.original is x.weight
        prefixes = [".".join(parts[:i]) for i in range(len(parts), -1, -1)]
        path = tuple((prefix.rpartition(".")[2], modules[prefix]) for prefix in prefixes)
        yield Weight(name, parameter, path[0][1], own, path)


class Layer(NamedTuple):
    """A linear layer, convolution or norm: a module with a fixed input size."""

    module: nn.Module
    inputs: int
    outputs: int

    @classmethod
    def of(cls, module: nn.Module) -> "Layer | None":
        """Wrap a module in a `Layer`, or return None if the module is not a layer."""
        if isinstance(module, CONVOLUTIONS):
            return cls(module, module.in_channels, module.out_channels)
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            return cls(module, module.input_size, module.hidden_size)
        if isinstance(module, nn.Linear):
            return cls(module, module.in_features, module.out_features)
        own = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        weight = dict(own).get("weight")
        if parametrize.is_parametrized(module, "weight"):
            *_, weight = module.get_submodule("parametrizations.weight").parameters(recurse=False)
        if is_embedding(module) or weight is None or not weight.ndim:
            return None
        outputs, inputs = weight.shape[-2:] if weight.ndim > 1 else 2 * weight.shape
        if is_transposed(module):
            outputs, inputs = inputs, outputs
        return cls(module, inputs, outputs)

    @property
    def multiplies(self) -> bool:
        """Whether the layer is a matmul rather than a norm or a depthwise convolution."""
        depthwise = isinstance(self.module, CONVOLUTIONS) and 1 < self.inputs == self.module.groups
        norm = "orm" in kind_of(self.module) and not isinstance(self.module, nn.Linear)
        return not (depthwise or norm)


def is_transposed(module: nn.Module) -> bool:
    """Return whether the weight of a layer is `[in, out]`."""
    if isinstance(module, CONVOLUTIONS):
        return module.transposed
    return kind_of(module) == "Conv1D"  # transformers' linear layer


class Layers:
    """A model's layers in order. Each module's layers form a slice of the list."""

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[Layer] = []
        self.slices: dict[nn.Module, slice] = {}
        self._add(model)

    def _add(self, module: nn.Module) -> None:
        start = len(self.layers)
        if (layer := Layer.of(module)) is not None:
            self.layers.append(layer)
        for child in module.children():
            if child not in self.slices:
                self._add(child)
        self.slices[module] = slice(start, len(self.layers))

    def within(self, module: nn.Module) -> list[Layer]:
        """Return the layers in a module, including the module itself."""
        return self.layers[self.slices[module]]

    def before(self, inner: nn.Module, outer: nn.Module) -> list[Layer]:
        """Return the layers in `outer` that come before its submodule `inner`."""
        return self.layers[self.slices[outer].start : self.slices[inner].start]

    def after(self, inner: nn.Module, outer: nn.Module) -> list[Layer]:
        """Return the layers in `outer` that come after its submodule `inner`."""
        return self.layers[self.slices[inner].stop : self.slices[outer].stop]
