"""The weights of a layer as matrix products: their sizes, and how ranks cut them."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from models.config import ModelConfig
from models.families import FAMILIES
from models.units import Unit
from spectral.batching import grouped

Cut = Literal["rows", "cols"] | None
"""What tensor parallelism cuts: a column-parallel weight by rows, a row-parallel one by cols."""

BLOCK: Final = ("gate", "up", "gate_up", "down")
"""Roles of the matrices of a feed-forward block."""


@dataclass(frozen=True)
class LayerWeight:
    """One parameter `[rows, cols]`, the product of its inputs of width cols.

    cut      as `Cut`
    expert   whether it is one of the routed experts', of which a layer has `experts`
    block    whether it belongs to a dense or shared feed-forward block
    router   whether it is a router's, which multiplies in float32
    """

    rows: int
    cols: int
    cut: Cut
    expert: bool
    block: bool
    router: bool

    def local(self, tensor: int) -> tuple[int, int]:
        """Rows and cols of the piece of one of `tensor` ranks."""
        rows, cols = self.rows, self.cols
        return rows // (tensor if self.cut == "rows" else 1), cols // (
            tensor if self.cut == "cols" else 1
        )


@dataclass(frozen=True)
class Layer:
    """The weights of one layer, with those of a single routed expert, and the elements of vectors:
    gains, which each rank has whole, and biases that tensor parallelism cuts."""

    weights: tuple[LayerWeight, ...]
    gains: int
    cut_biases: int

    def elements(self, tensor: int) -> int:
        """Elements on one of `tensor` ranks, without routed experts."""
        vectors = self.gains + self.cut_biases // tensor
        return vectors + sum(math.prod(w.local(tensor)) for w in self.weights if not w.expert)

    def expert_elements(self, tensor: int) -> int:
        """Elements of one routed expert on one of `tensor` ranks that share it."""
        return sum(math.prod(w.local(tensor)) for w in self.weights if w.expert)


def layer_weights(model: ModelConfig, layer: int) -> Layer:
    """Return the weights of layer number `layer`; layers of one kind share the answer."""
    moe = model.mixture(layer)
    return _kind(model, 0 if moe is None else moe.dense_layers)


@lru_cache(maxsize=64)
def _kind(model: ModelConfig, layer: int) -> Layer:
    whole, half = (_by_parameter(model, layer, tensor) for tensor in (1, 2))
    odd = any(n % 2 for n in (model.heads, model.query_groups, model.ffn))
    weights = []
    for name, units in whole.items():
        cols, elements = units[0].axes[-1], sum(unit.numel for unit in units)
        cut: Cut = None
        if not odd and half[name][0].local_axes(2)[-1] < cols:
            cut = "cols"
        elif not odd and sum(math.prod(unit.local_axes(2)) for unit in half[name]) < elements:
            cut = "rows"
        expert = units[0].domain == "expert"
        block = units[0].role.removeprefix("shared_") in BLOCK and not expert
        router = units[0].role == "router"
        weights.append(LayerWeight(elements // cols, cols, cut, expert, block, router))
    vectors = [unit for unit in _units(model, layer, 1) if not unit.is_matrix]
    gains = sum(unit.numel for unit in vectors if unit.replicated)
    return Layer(tuple(weights), gains, sum(unit.numel for unit in vectors) - gains)


def _by_parameter(model: ModelConfig, layer: int, tensor: int) -> dict[str, list[Unit]]:
    """Matrices of the parameters of a layer on one of `tensor` ranks, of experts the first one."""
    matrices = (
        unit
        for unit in _units(model, layer, tensor)
        if unit.is_matrix and (unit.domain == "dense" or ".experts.0." in unit.name)
    )
    return grouped(matrices, lambda unit: unit.parameter)


def _units(model: ModelConfig, layer: int, tensor: int) -> list[Unit]:
    family = FAMILIES[model.family]
    units = family.units(model, layers=[layer], tensor_size=tensor, expert_tensor=tensor)
    return [unit for unit in units if unit.layer == layer]
