"""Layouts of a model over ranks: sizes of the axes, layers of a chunk, positions of a sequence.

Context parallelism cuts a sequence into `2 * size` chunks, and rank r holds chunks r and `2 * size
- 1 - r`. Under the causal mask a late chunk costs more than an early chunk, so with these pairs
every rank has the same work. Megatron cuts batches and rotary embeddings in this way too.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

QKVUnits = Literal["head", "group", "component", "fused"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Number of ranks on each axis, and the division of the pipeline.

    tensor             ranks that share each dense matrix
    pipeline           ranks that share the layers
    virtual_pipeline   model chunks of each pipeline rank
    context            ranks that share each sequence
    expert             ranks that share the experts of a layer
    expert_tensor      ranks that share each of these experts
    sequence_parallel  whether activations between tensor-parallel blocks are cut
    first_stage_layers, last_stage_layers   None for as many as the other stages have
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None


@dataclass(frozen=True)
class ChunkSpec:
    """The contents of one model chunk on a pipeline rank.

    layers      numbers of its layers, ascending
    embedding   whether it holds the embedding
    head        whether it holds the head, and the final norm
    """

    layers: tuple[int, ...]
    embedding: bool = True
    head: bool = True


@dataclass(frozen=True, kw_only=True)
class Split:
    """The division of weights into units, and a rank's share of them.

    qkv_units       units of a fused attention weight
    split_gate_up   whether gate and up are two units
    tensor_rank, tensor_size   the tensor-parallel rank, and the number of these ranks
    expert_rank, expert_size   the same for expert parallelism: a rank holds `experts / expert_size`
                               of each layer, with the domain `expert`
    expert_tensor   ranks that a routed expert's matrices are cut over
    """

    qkv_units: QKVUnits = "head"
    split_gate_up: bool = True
    tensor_rank: int = 0
    tensor_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    expert_tensor: int = 1


def context_chunks(length: int, *, rank: int, size: int) -> list[range]:
    """Return the positions that context rank `rank` of `size` holds, for a sequence of `length`
    tokens.

    There is one range for one rank, else two ranges of `length / (2 * size)` positions in ascending
    order. Raises ValueError if the length is not divisible by `2 * size`.
    """
    if size == 1:
        return [range(length)]
    if length % (2 * size):
        raise ValueError(
            f"length must be divisible by 2 * context parallel size = {2 * size}, got {length}"
        )
    step = length // (2 * size)
    return [range(i * step, (i + 1) * step) for i in (rank, 2 * size - 1 - rank)]


def context_part(whole: Tensor, dim: int, *, rank: int, size: int) -> Tensor:
    """Return the part of `whole` on context rank `rank` of `size`; dimension `dim` is the sequence.

    This is `whole` itself for one rank. Raises ValueError if the length is not divisible by `2 *
    size`.
    """
    if size == 1:
        return whole
    chunks = context_chunks(whole.shape[dim], rank=rank, size=size)
    return torch.cat([whole.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim)


def in_sequence_order(parts: Tensor, size: int) -> Tensor:
    """Join the whole sequence `[s, ...]` from the parts of all `size` context ranks.

    `parts` contains the parts in the order of ranks along the first dimension.
    """
    early, late = parts.unflatten(0, (size, 2, -1)).unbind(1)  # [size, s / (2 size), ...]
    return torch.cat([early, late.flip(0)]).flatten(0, 1)
