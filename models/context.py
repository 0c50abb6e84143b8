"""Which part of every sequence a context-parallel rank holds, and how the parts are joined.

A sequence is cut into `2 * size` chunks and rank r holds chunks r and `2 * size - 1 - r`: under the
causal mask a late chunk costs more than an early one, so that every rank has the same work.
Megatron cuts batches and rotary embeddings in this way too.
"""

import torch
from torch import Tensor


def context_chunks(length: int, *, rank: int, size: int) -> list[range]:
    """Return the positions of a sequence of `length` tokens on context rank `rank` of `size`.

    One range for one rank, else two of `length / (2 * size)` positions each, in ascending order.
    Raises ValueError if the length does not divide.
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

    `whole` itself for one rank. Raises ValueError if the length does not divide.
    """
    if size == 1:
        return whole
    chunks = context_chunks(whole.shape[dim], rank=rank, size=size)
    return torch.cat([whole.narrow(dim, chunk.start, len(chunk)) for chunk in chunks], dim)


def in_sequence_order(parts: Tensor, size: int) -> Tensor:
    """Return the whole sequence `[s, ...]` of the parts of all `size` context ranks.

    `parts` has them in the order of ranks along the first dimension.
    """
    early, late = parts.unflatten(0, (size, 2, -1)).unbind(1)  # [size, s / (2 size), ...]
    return torch.cat([early, late.flip(0)]).flatten(0, 1)
