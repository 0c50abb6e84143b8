"""Attention within documents by the kernel of variable length, which skips what they do not see."""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from models.documents import Lengths

VARYING: Final = "flash_attention of variable length"
"""Name of the kernel."""
LARGEST_HEAD: Final = 256
ALIGNMENT: Final = 8
"""Elements of which a head is a multiple."""


def check_varying(head: int, dtype: torch.dtype) -> None:
    """Raise RuntimeError unless the kernel takes heads of so many elements of a type."""
    if dtype.itemsize != 2 or head > LARGEST_HEAD:
        raise RuntimeError(
            f"documents need that of variable length, which takes 16 bits and heads of at most "
            f"{LARGEST_HEAD}"
        )


def varying_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, lengths: Lengths
) -> Tensor:
    """Return the attention output `[s, b, heads * d]` of the last s positions of sequences of t.

    query        `[s, b, heads, d]`
    key, value   `[t, b, groups, d]`, t >= s; smaller heads are padded to the size that all have
    lengths      of the documents, whose queries see no keys of others
    """
    from torch.nn.attention.varlen import varlen_attn  # here: it loads the compiler

    size = max(query.shape[-1], value.shape[-1])
    size += -size % ALIGNMENT
    # [b s, heads, size]; to pad by nothing is a copy
    q, k, v = (
        (x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])))
        .transpose(0, 1)
        .flatten(0, 1)
        for x in (query, key, value)
    )
    out = varlen_attn(
        q,
        k,
        v,
        lengths.queries,
        lengths.keys,
        lengths.most_queries,
        lengths.most_keys,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)
    out = out[..., : value.shape[-1]].unflatten(0, (query.shape[1], -1))
    return out.transpose(0, 1).flatten(2)  # [s, b, heads * d]
