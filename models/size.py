"""How large a model is and how much one token costs, from its units alone."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from models.config import ModelConfig
from models.families import FAMILIES
from models.units import Unit


@dataclass(frozen=True)
class ModelSize:
    """Parameters (elements) and FLOPs (floating-point operations, a multiply-add is two)."""

    parameters: int
    parameters_by_role: dict[str, int]
    flops_per_token: float


def all_units(model: ModelConfig, **options: object) -> list[Unit]:
    """The units of the whole model as one process would hold them."""
    return FAMILIES[model.family].units(model, layers=range(model.layers), **options)


def model_size(model: ModelConfig, sequence_length: int) -> ModelSize:
    """Size of `model` and the training FLOPs of one token in a sequence of `sequence_length`.

    Forward and backward of every matrix but the embedding (a lookup): 6 FLOPs per element. Causal
    attention scores and their values: 6 * layers * heads * head size * sequence length, half of
    the full square, because the masked half need not be computed.
    """
    by_role = count_by_role(all_units(model))
    matrices = sum(n for role, n in by_role.items() if role not in ("embedding", "gain"))
    attention = 6 * model.layers * model.heads * model.head_size * sequence_length
    return ModelSize(sum(by_role.values()), by_role, 6.0 * matrices + attention)


def count_by_role(units: Iterable[Unit]) -> dict[str, int]:
    """Elements of the whole units of each role."""
    counts: Counter[str] = Counter()
    for unit in units:
        counts[unit.role] += unit.numel
    return dict(counts)
