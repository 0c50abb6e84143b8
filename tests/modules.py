"""Small modules whose layers are listed in a string."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def module(layers: str = "", forward: Callable[..., Any] | None = None, /, **members: Any) -> Any:
    """Return a module with the given forward method, members, and layers listed after a class name.

    "Attention: q 12 8, out 8 4, bank 3x12x12" makes a module of class `Attention` with two linear
    layers without bias (name, inputs, outputs) and a parameter with this shape. Other words are
    ignored.
    """
    name, _, entries = layers.rpartition(":")
    made = type(name or "Module", (nn.Module,), {"forward": forward} if forward else {})()
    for key, *words in filter(None, map(str.split, entries.split(","))):
        match [word for word in words if word[0].isdigit()]:
            case [inputs, outputs]:
                setattr(made, key, linear(int(inputs), int(outputs)))
            case [shape]:
                sizes = [int(size) for size in shape.split("x")]
                setattr(made, key, nn.Parameter(torch.randn(sizes)))
            case [_, *_]:
                raise ValueError(f"{key} must have two sizes or a shape, got {words}")
    for key, member in members.items():
        setattr(made, key, member)
    return made
