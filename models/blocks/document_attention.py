"""Documents packed into the sequences of a micro-batch, and attention within documents.

Attention does not cross document boundaries: the variable-length kernel skips other documents.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from models.layout import context_chunks, context_part

Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Lengths:
    """The documents of packed queries and keys, in the format of variable-length kernels.

    queries, keys   cumulative lengths of documents (cu_seqlens), int32 `[documents + 1]` on the
                    device, starting with 0
    most_queries, most_keys   largest number of queries and of keys in one document
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


@dataclass(frozen=True)
class DocumentRange:
    """The documents of a range of queries.

    firsts    `[b, s]`, for each query the position of its document's first token in the sequence
    lengths   the documents in the format of variable-length kernels
    """

    firsts: Tensor
    lengths: Lengths


@dataclass(kw_only=True)
class Documents(PackedSeqParams):
    """The documents of a context-parallel rank's tokens `[b, s]`.

    Megatron passes this object from the model to the core attention of every layer. Because its
    format is not `thd`, Megatron does not change the shapes of queries, keys and values.

    positions   position of each token in its document `[b, s]`
    parts       documents of each range of `context_chunks`, in the same order
    """

    positions: Tensor
    parts: list[DocumentRange]


def documents_of(firsts: Tensor, move: Move, *, rank: int = 0, size: int = 1) -> Documents:
    """Return the documents of whole sequences on context rank `rank` of `size`.

    `firsts` `[b, s]`, on the host, contains for each token the position of its document's first
    token in the sequence; `move` copies a tensor to the device.
    """
    length = firsts.shape[1]
    place = {"rank": rank, "size": size}
    positions = context_part(torch.arange(length) - firsts, 1, **place)
    parts = []
    for chunk in context_chunks(length, **place):
        of_chunk = firsts[:, chunk.start : chunk.stop]
        parts.append(DocumentRange(move(of_chunk), lengths_of(of_chunk, chunk, move)))
    return Documents(
        qkv_format="sbhd",
        max_seqlen_q=length,
        max_seqlen_kv=length,
        positions=move(positions),
        parts=parts,
    )


def lengths_of(firsts: Tensor, chunk: range, move: Move) -> Lengths:
    """Return `Lengths` of the queries in `chunk` and the keys up to the end of `chunk`."""
    pairs = torch.cat([_queries_and_keys(row, chunk) for row in firsts])
    ends = F.pad(pairs.cumsum(0), (0, 0, 1, 0)).int()
    queries, keys = (move(x.contiguous()) for x in ends.unbind(1))
    most_queries, most_keys = pairs.amax(0).tolist()
    return Lengths(queries, keys, most_queries, most_keys)


def _queries_and_keys(firsts: Tensor, chunk: range) -> Tensor:
    """Return `[documents, 2]`, the number of queries and of keys of each document in a sequence."""
    starts = firsts.unique_consecutive()
    ends = F.pad(starts[1:], (0, 1), value=chunk.stop)
    pairs = torch.stack([ends - starts.clamp(min=chunk.start), ends - starts], 1)
    earlier = starts.new_tensor([[0, starts[0]]])  # keys to which no query attends
    return torch.cat([earlier, pairs]) if starts[0] > 0 else pairs


VARYING: Final = "flash_attention of variable length"
"""Name of the variable-length kernel."""
LARGEST_HEAD: Final = 256
ALIGNMENT: Final = 8
"""Head dimensions are padded to a multiple of this number."""


def check_varying(head: int, dtype: torch.dtype) -> None:
    """Raise RuntimeError if the variable-length kernel does not support this head dimension or
    dtype."""
    if dtype.itemsize != 2 or head > LARGEST_HEAD:
        raise RuntimeError(
            f"documents need {VARYING}, for which the dtype must have 16 bits and the head "
            f"dimension must be at most {LARGEST_HEAD}, got {dtype} and {head}"
        )


def varying_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, lengths: Lengths
) -> Tensor:
    """Return the attention output `[s, b, heads * d]` of the last s positions of sequences of t.

    query        `[s, b, heads, d]`
    key, value   `[t, b, groups, d]`, t >= s; all heads are padded to one aligned dimension
    lengths      the documents; queries do not attend to other documents
    """
    # Imported here, because the import loads the compiler.
    from torch.nn.attention.varlen import varlen_attn

    size = max(query.shape[-1], value.shape[-1])
    size += -size % ALIGNMENT
    # [b s, heads, size]; F.pad would copy even without padding
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
