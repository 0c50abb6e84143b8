"""The units of one pipeline stage, as every tensor-parallel rank of it declares them."""

from collections.abc import Sequence
from typing import Any

from models.config import ModelConfig
from models.families import FAMILIES
from models.layout import ChunkSpec, Layout
from models.units import Unit


def declare_stage_units(
    model: ModelConfig, chunks: Sequence[ChunkSpec], layout: Layout, **split: Any
) -> list[list[Unit]]:
    """Declare the units of each tensor-parallel rank of a stage, in forward order.

    `chunks` are those of the stage's ranks, in forward order; `split` are further fields of
    `models.layout.Split`, such as which of the ranks that share experts this one is.
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
    """Keep the units of one domain, "dense" or "expert", of each tensor-parallel rank."""
    return [[unit for unit in units if unit.domain == name] for units in stage_units]
