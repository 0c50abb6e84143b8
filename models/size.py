"""How large a model is and how much one token costs, from its units alone."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from models.config import ModelConfig
from models.families import FAMILIES
from models.units import Unit


@dataclass(frozen=True)
class ModelSize:
    """Parameters (elements) and FLOPs (floating-point operations, a multiply-add is two).

    active_parameters   those that one token uses: of the routed experts only its `top_k`
    """

    parameters: int
    active_parameters: int
    flops_per_token: float


def all_units(model: ModelConfig, **split: Any) -> list[Unit]:
    """Return the units of all layers; `split` are the fields of `Split`."""
    return FAMILIES[model.family].units(model, layers=range(model.layers), **split)


@lru_cache(maxsize=64)
def model_size(model: ModelConfig, sequence_length: float) -> ModelSize:
    """Return the size of `model` and the training FLOPs of one token in a sequence of
    `sequence_length`, or in documents of such an attended length.

    Forward and backward of every active matrix but an embedding that is not tied to the head (a
    lookup): 6 FLOPs per element.
    Causal attention scores and their values: 6 * heads * (key + value size) per layer and key, of
    those keys alone that the mask lets through.
    """
    units = all_units(model)
    active = active_by_role(model, units)
    products = {unit.role for unit in units if unit.is_matrix}
    products -= set() if model.tie_embeddings else {"embedding"}
    matrices = sum(active[role] for role in products)
    head = model.head_size + model.value_head_size
    keys = sum(mean_keys(model, layer, sequence_length) for layer in range(model.layers))
    attention = 6 * model.heads * head * keys
    return ModelSize(
        sum(unit.numel for unit in units), sum(active.values()), 6.0 * matrices + attention
    )


def mean_keys(model: ModelConfig, layer: int, sequence_length: float) -> float:
    """Return how many keys a token sees in layer `layer`, the mean over the sequence.

    Half of the sequence under the causal mask; with a window w of s tokens `w - w^2 / (2 s)`.
    """
    window = min(model.window(layer) or sequence_length, sequence_length)
    return window - window**2 / (2 * sequence_length)


def active_by_role(model: ModelConfig, units: Sequence[Unit]) -> Counter[str]:
    """Return the elements of each role that one token uses."""
    counts: Counter[str] = Counter()
    for unit in units:
        counts[unit.role] += unit.numel
    if model.moe is not None:
        for role in {unit.role for unit in units if unit.domain == "expert"}:
            counts[role] = counts[role] // model.moe.experts * model.moe.top_k
    return counts
