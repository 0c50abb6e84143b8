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
        """Angles `[s / context ranks, 1, 1, head size]` of a sequence of `max_seq_len` tokens."""
        if packed_seq:
            raise ValueError("rotary embeddings of packed sequences are not supported")
        with torch.no_grad():
            angles = self.get_emb(max_seq_len, offset)
        group = self.cp_group if cp_group is None else cp_group
        if group is None:
            return angles
        return context_part(angles, 0, rank=group.rank(), size=group.size())
