"""The layout of a model across ranks: parallel sizes, layers per chunk, sequence positions.

Context parallelism splits a sequence into `2 * size` chunks, and rank r processes chunks r and `2 *
size - 1 - r`. Later chunks cost more under a causal mask, so pairing an early chunk with a late one
balances the work across ranks. Megatron splits batches and rotary embeddings the same way.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

QKVUnits = Literal["head", "group", "component", "fused"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes (numbers of ranks or chunks) and pipeline stage sizes.

    tensor             ranks that share each dense matrix
    pipeline           ranks that share the layers
    virtual_pipeline   model chunks per pipeline rank
    context            ranks that share each sequence
    expert             ranks that share the experts of a layer
    expert_tensor      ranks that share each routed expert
    sequence_parallel  whether activations between tensor-parallel blocks are sharded
    first_stage_layers, last_stage_layers   number of layers; None: the same as in other stages
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

    layers      global indices of the layers, ascending
    embedding   whether the chunk contains the embedding
    head        whether the chunk contains the head and the final norm
    """

    layers: tuple[int, ...]
    embedding: bool = True
    head: bool = True


@dataclass(frozen=True, kw_only=True)
class Split:
    """The division of weights into units, and the share of the weights that a rank holds.

    qkv_units       the part of a fused attention weight that forms one unit
    split_gate_up   whether gate and up are two units
    tensor_rank, tensor_size   tensor-parallel rank and size
    expert_rank, expert_size   expert-parallel rank and size; a rank holds `experts / expert_size`
                               experts per layer
    expert_tensor   number of ranks over which each routed expert's matrices are sharded
    """

    qkv_units: QKVUnits = "head"
    split_gate_up: bool = True
    tensor_rank: int = 0
    tensor_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    expert_tensor: int = 1


def context_chunks(length: int, *, rank: int, size: int) -> list[range]:
    """Return the positions held by context rank `rank` of `size` in a sequence of `length` tokens.

    The result is one range if `size` is 1, otherwise two ranges of `length / (2 * size)` positions
    in ascending order. Raises ValueError if `length` is not divisible by `2 * size`.
    """
    if size == 1:
        return [range(length)]
    if length % (2 * size):
        raise ValueError(
            f"length must be divisible by 2 * context-parallel size = {2 * size}, got {length}"
        )
    step = length // (2 * size)
    return [range(i * step, (i + 1) * step) for i in (rank, 2 * size - 1 - rank)]


def context_part(whole: Tensor, dim: int, *, rank: int, size: int) -> Tensor:
    """Return the part of `whole` held by context rank `rank` of `size`. The sequence dimension is
    `dim`.

    Returns `whole` itself if `size` is 1. Raises ValueError if the sequence length is not divisible
    by `2 * size`.
    """
    if size == 1:
        return whole
    chunks = context_chunks(whole.shape[dim], rank=rank, size=size)
    return torch.cat([whole.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim)


def in_sequence_order(parts: Tensor, size: int) -> Tensor:
    """Reassemble the full sequence `[s, ...]` from the parts held by all `size` context ranks.

    `parts` is the concatenation of these parts in rank order.
    """
    early, late = parts.unflatten(0, (size, 2, -1)).unbind(1)  # [size, s / (2 size), ...]
    return torch.cat([early, late.flip(0)]).flatten(0, 1)
