"""Rotary position embedding of the positions that a context-parallel rank holds."""

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    RotaryEmbedding as MegatronRotaryEmbedding,
)
from torch import Tensor

from models.context import context_part


class RotaryEmbedding(MegatronRotaryEmbedding):
    """Megatron's rotary angles, cut to this rank's positions on any device.

    Megatron's own cut goes through pinned CUDA memory.
    """

    def forward(
        self,
        max_seq_len: int,
        offset: int = 0,
        packed_seq: bool = False,
        cp_group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """Return the angles `[s / context ranks, 1, 1, head size]` of `max_seq_len` tokens."""
        if packed_seq:
            raise ValueError("rotary embeddings of packed sequences are not supported")
        with torch.no_grad():
            angles = self.get_emb(max_seq_len, offset)
        group = self.cp_group if cp_group is None else cp_group
        if group is None:
            return angles
        return context_part(angles, 0, rank=group.rank(), size=group.size())


def rotate_halves(query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate `query` `[s, b, heads, d]` and `key` `[s, b, groups, d]` by their positions.

    Elements i and i + d / 2 of each head are rotated by `angles[..., i]`; `angles` `[s, 1, 1, d]`
    repeat in both halves (Su et al., "RoFormer", 2021, in the layout of GPT-NeoX and Llama).
    """
    cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
    return query * cos + half_turned(query) * sin, key * cos + half_turned(key) * sin


def half_turned(heads: Tensor) -> Tensor:
    """Return the halves `(x, y)` of the last dimension as `(-y, x)`."""
    first, second = heads.chunk(2, -1)
    return torch.cat([-second, first], -1)


def rotate_pairs(heads: Tensor, angles: Tensor) -> Tensor:
    """Rotate each pair of neighbours in `heads` `[s, b, heads, d]` by its angle, as DeepSeek does.

    `angles` `[s, 1, 1, d]` repeat the pairs' angles in both halves. The first elements of all pairs
    are returned before the second ones, in queries and in keys, so that their product is the same.
    """
    turn = angles[..., : angles.shape[-1] // 2]
    cos, sin = turn.cos().to(heads.dtype), turn.sin().to(heads.dtype)
    first, second = heads[..., 0::2], heads[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
