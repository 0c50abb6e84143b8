"""Rotary position embedding for the positions held by a context-parallel rank."""

from math import log
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    RotaryEmbedding as MegatronRotaryEmbedding,
)
from torch import Tensor

from models.blocks.attention import Documents
from models.config import LLAMA3_KEYS, RopeScalingConfig
from models.layout import context_part


class RotaryEmbedding(MegatronRotaryEmbedding):
    """Cosines and sines of Megatron's rotary angles at this rank's positions, computed once for all
    layers, passes and steps.

    Megatron selects a rank's positions via pinned CUDA memory, and computes cosines and sines in
    every layer. A compiled kernel for queries and keys would recompute cosines and sines for every
    head; such rotations took 116 of 2,074 ms of kernel time per step of llama1b_muon on an H200.
    """

    def __init__(
        self,
        kv_channels: int,
        *,
        rotary_base: float,
        scaling: RopeScalingConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(kv_channels, rotary_base=rotary_base, **options)
        self.scale = 1.0  # multiplier for rotated queries and keys
        if scaling is not None:
            self.inv_freq = self._scaled(scaling, kv_channels, rotary_base)
            if scaling.kind == "yarn":
                self.scale = scaling.attention_factor or 0.1 * log(scaling.factor) + 1.0
        self._made: dict[tuple[int, int, dist.ProcessGroup | None], Tensor] = {}

    def forward(
        self,
        max_seq_len: int,
        offset: int = 0,
        packed_seq: bool = False,
        cp_group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """Return `turns` `[s / context ranks, 1, 1, 2 d]` for `max_seq_len` tokens and head
        dimension d. Cosines of the angles come first, followed by sines with the signs that
        `rotated` expects."""
        if packed_seq:
            raise ValueError("rotary embeddings of packed sequences are not supported")
        return self._kept(max_seq_len, offset, self.cp_group if cp_group is None else cp_group)

    def of_documents(self, documents: Documents) -> Tensor:
        """Return cosines and sines `[s / context ranks, b, 1, 2 d]` for token positions within
        documents."""
        whole = self._kept(documents.max_seqlen_q, 0, None)
        return whole[documents.positions.T, 0]

    @torch.no_grad()
    def _kept(self, length: int, offset: int, group: dist.ProcessGroup | None) -> Tensor:
        key = length, offset, group
        if key not in self._made:
            angles = self.get_emb(length, offset)
            if group is not None:
                angles = context_part(angles, 0, rank=group.rank(), size=group.size())
            first, second = angles.sin().chunk(2, -1)
            turns = torch.cat([angles.cos(), -first, second], -1)
            self._made[key] = turns if self.scale == 1 else turns * self.scale
        return self._made[key]

    def _scaled(self, scaling: RopeScalingConfig, size: int, base: float) -> Tensor:
        """Return the scaled frequencies `[size / 2]`, using Megatron's formulas.

        Sources: Chen et al., "Extending Context Window of Large Language Models via Positional
        Interpolation" (arXiv 2306.15595); "The Llama 3 Herd of Models" (2407.21783); "YaRN:
        Efficient Context Window Extension of Large Language Models" (2309.00071), section 3.2.
        """
        plain, factor = self.inv_freq, scaling.factor
        length = scaling.original_max_position_embeddings
        if scaling.kind == "linear":
            return plain / factor
        if scaling.kind == "llama3":
            bounds = {key: getattr(scaling, key) for key in LLAMA3_KEYS}
            scaled: Tensor = self._apply_scaling(
                plain, factor, original_max_position_embeddings=length, **bounds
            )
            return scaled
        ends = yarn._yarn_find_correction_range(
            scaling.beta_fast, scaling.beta_slow, size, base, length, scaling.truncate
        )
        slow = yarn._yarn_linear_ramp_mask(*ends, size // 2, plain.device)
        return plain / factor * slow + plain * (1 - slow)


def rotate_halves(query: Tensor, key: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Apply rotary positions to `query` `[s, b, heads, d]` and `key` `[s, b, groups, d]`.

    Elements i and i + d / 2 of a head form a pair that is rotated by the same angle (Su et al.,
    "RoFormer", 2021, in the layout of GPT-NeoX and Llama). `turns` `[s, 1 or b, 1, 2 d]` is the
    output of `RotaryEmbedding`.
    """
    cos, sin = turns.to(query.dtype).chunk(2, -1)
    return rotated(query, cos, sin), rotated(key, cos, sin)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `heads * cos + swapped * sin`, where `swapped` is `heads` `[..., d]` with its halves
    swapped. The caller must have negated the first half of `sin`. Pass `-sin` for the inverse
    rotation."""
    halves = heads.reshape(*heads.shape[:-1], 2, -1)
    return heads * cos + halves.flip(-2).reshape(heads.shape) * sin


def rotate_pairs(heads: Tensor, turns: Tensor) -> Tensor:
    """Apply rotary positions to interleaved pairs in `heads` `[s, b, heads, d]`, as in DeepSeek.

    `turns` `[s, 1 or b, 1, 2 d]` is the output of `RotaryEmbedding`. In the output, the first
    elements of all pairs come before the second elements. Queries and keys use the same order, so
    their dot products are unaffected.
    """
    cos, _, _, sin = turns.to(heads.dtype).chunk(4, -1)
    first, second = heads[..., 0::2], heads[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
