"""The units of one pipeline stage, as every tensor-parallel rank of it declares them."""

from collections.abc import Sequence

from models.config import ModelConfig
from models.families import FAMILIES
from models.units import Unit
from parallel.comm.groups import ChunkSpec


def declare_stage_units(
    model: ModelConfig,
    chunks: Sequence[ChunkSpec],
    *,
    tensor_size: int,
    expert_rank: int = 0,
    expert_size: int = 1,
    expert_tensor: int = 1,
    **options: object,
) -> list[list[Unit]]:
    """Declare the units of each tensor-parallel rank of a stage, in forward order.

    Args:
        model: the shape of the whole model.
        chunks: the model chunks of the stage's ranks, in forward order.
        tensor_size: number of tensor-parallel ranks.
        expert_rank, expert_size, expert_tensor: which of the ranks that share a layer's experts,
            how many share them, and how many share each expert.
        options: further options of the family's `units`, such as `qkv_units`.
    """
    if expert_size > 1:
        options |= {"expert_rank": expert_rank, "expert_size": expert_size}
    if expert_tensor > 1:
        options["expert_tensor"] = expert_tensor
    return [
        [
            unit
            for chunk in chunks
            for unit in FAMILIES[model.family].units(
                model,
                layers=chunk.layers,
                embedding=chunk.embedding,
                head=chunk.head,
                tensor_rank=rank,
                tensor_size=tensor_size,
                **options,
            )
        ]
        for rank in range(tensor_size)
    ]


def units_of_domain(stage_units: Sequence[Sequence[Unit]], name: str) -> list[list[Unit]]:
    """Keep the units of one domain, "dense" or "expert", of each tensor-parallel rank."""
    return [[unit for unit in units if unit.domain == name] for units in stage_units]
