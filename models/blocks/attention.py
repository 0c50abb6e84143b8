"""Core attention using PyTorch's scaled_dot_product_attention or FlashAttention 3 or 4.

Several documents can be packed into one sequence. Attention does not cross document boundaries: the
variable-length kernel skips the keys of other documents.
"""

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.layout import context_chunks, context_part, in_sequence_order
from spectral.kernels.library import is_slow

FUSED: Final = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]
"""Fused kernels in order of preference. PyTorch's default order depends on the CUDA version that
PyTorch was built with. On Hopper, FlashAttention 2 takes 1.5 times as long as cuDNN's kernel."""
ROWS: Final = 256
"""Number of queries per block when scores are computed without a fused kernel."""

SMALL_KEYS: Final = 256 * 64
"""Largest product of key count and head dimension for which CPUs compute bfloat16 attention in
float32. PyTorch's bfloat16 kernel takes 2.5 times as long as the float32 kernel for 128 keys of
dimension 32, but only 0.85 times as long for 512 keys of dimension 128 (torch 2.13, one thread, AMD
EPYC with AVX-512)."""

KERNELS: Final = {int(kernel.value): kernel.name.lower() for kernel in (*FUSED, SDPBackend.MATH)}

FLASH_MODULES: Final = {
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn.cute",
}
"""Python modules of the kernels, keyed by `model.attention_kernel`."""
FLASH_CAPABILITIES: Final = {"flash_attention_3": (8, 9), "flash_attention_4": (9, 10, 11, 12)}
"""Supported major compute capabilities of each kernel."""


VARYING: Final = "flash_attention of variable length"
"""Name of the variable-length kernel."""
LARGEST_HEAD: Final = 256
ALIGNMENT: Final = 8
"""Head dimensions are padded to a multiple of this number."""

Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class DocumentRange:
    """Document boundaries for a range of queries.

    firsts          `[b, s]`, the position in the sequence at which each query's document starts
    queries, keys   cumulative document lengths (cu_seqlens) for variable-length kernels, int32
                    `[documents + 1]` on the device, starting with 0
    most_queries    largest number of queries in a document
    most_keys       largest number of keys in a document
    """

    firsts: Tensor
    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


@dataclass(kw_only=True)
class Documents(PackedSeqParams):
    """Document boundaries for the tokens `[b, s]` of a context-parallel rank.

    Megatron passes this object through to the core attention of every layer. Because the object's
    format is not `thd`, Megatron leaves the shapes of queries, keys and values unchanged.

    positions   position of each token within its document, `[b, s]`
    parts       document boundaries for each range in `context_chunks`, in the same order
    """

    positions: Tensor
    parts: list[DocumentRange]


class CoreAttention(torch.nn.Module):
    """Causal softmax(scale q k^T) v, with a default scale of 1 / sqrt(d).

    Replaces Megatron's DotProductAttention, which materialises the scores `[s, s]`. Under context
    parallelism, each rank computes queries, keys and values for its part of the sequence
    (models/layout.py) and all-gathers the keys and values, so attention is exact. Subclasses
    implement attention for one part of the queries.
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,
    ) -> None:
        super().__init__()
        self.context: dist.ProcessGroup | None = None
        if config.context_parallel_size > 1:
            assert pg_collection is not None
            self.context = pg_collection.cp
        head_size = config.kv_channels
        self.scale = 1.0 / math.sqrt(head_size) if softmax_scale is None else softmax_scale

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, documents: DocumentRange | None = None
    ) -> Tensor:
        """Return the attention output `[s, b, heads * d]` for queries at the last s of t positions.

        query        `[s, b, heads, d]`
        key, value   `[t, b, groups, d]`, t >= s
        documents    boundaries that attention does not cross; None: no boundaries
        """
        raise NotImplementedError

    def largest_score(self, query: Tensor, key: Tensor, documents: DocumentRange | None) -> Tensor:
        """Return the largest scaled score `[]`, excluding masked scores. See `attend` for the
        arguments."""
        return largest_causal_score(query, key, self.scale, documents=documents)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Documents | None = None,
        **_: object,
    ) -> Tensor:
        """Return the attention output `[s, b, heads * d]` for `query` `[s, b, heads, d]` and `key`,
        `value` `[s, b, groups, d]`. The mask is always causal; `attention_mask` is ignored. With
        `packed_seq_params`, attention does not cross document boundaries.
        """
        if self.context is None:
            return self.attend(query, key, value, whole(packed_seq_params))
        key, value = gather_sequence(key, value, self.context)
        outputs = [
            self.attend(part, key[:stop], value[:stop], documents)
            for part, stop, documents in self._parts(query, key.shape[0], packed_seq_params)
        ]
        return torch.cat(outputs)

    @torch.no_grad()
    def largest_logit(
        self, query: Tensor, key: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """Return the largest scaled score `[]` of this rank's queries, excluding masked scores.
        Monitored steps call this method. See `forward` for the arguments."""
        if self.context is None:
            return self.largest_score(query, key, whole(documents))
        key, _ = gather_sequence(key, key[..., :0], self.context)
        scores = [
            self.largest_score(part, key[:stop], part_documents)
            for part, stop, part_documents in self._parts(query, key.shape[0], documents)
        ]
        return torch.stack(scores).amax()

    def _parts(
        self, query: Tensor, length: int, documents: Documents | None
    ) -> Iterator[tuple[Tensor, int, DocumentRange | None]]:
        """Yield (chunk, end position of the chunk in the sequence, document boundaries) for each
        chunk of this rank's queries."""
        assert self.context is not None
        chunks = context_chunks(length, rank=self.context.rank(), size=self.context.size())
        parts = [None] * len(chunks) if documents is None else documents.parts
        for part, chunk, part_documents in zip(
            query.chunk(len(chunks)), chunks, parts, strict=True
        ):
            yield part, chunk.stop, part_documents


class SDPACoreAttention(CoreAttention):
    """Attention using PyTorch's scaled_dot_product_attention.

    Each KV head is copied in memory for every query head of its group, but only for float32 on
    GPUs.
    """

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, documents: DocumentRange | None = None
    ) -> Tensor:
        """Return the output of `causal_attention`."""
        return causal_attention(query, key, value, self.scale, documents)


def flash_attention(kernel: str) -> Callable[..., Any]:
    """Return the attention function of `kernel`.

    Raises ImportError if the kernel's package cannot be imported.
    """
    function: Callable[..., Any] = importlib.import_module(FLASH_MODULES[kernel]).flash_attn_func
    return function


class FlashCoreAttention(CoreAttention):
    """16-bit attention on GPUs using the package for `kernel`, a key of `FLASH_MODULES`."""

    def __init__(self, *arguments: Any, kernel: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.function = flash_attention(kernel)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, documents: DocumentRange | None = None
    ) -> Tensor:
        """Return the attention output `[s, b, heads * d]`; see `CoreAttention.attend`.

        Raises ValueError if `documents` is given; config checks already reject this combination.
        """
        if documents is not None:
            raise ValueError("FlashAttention packages do not support a document mask")
        # As in this project, the causal mask of these packages is aligned to the bottom right.
        output = self.function(
            *(x.transpose(0, 1) for x in (query, key, value)),
            softmax_scale=self.scale,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        # Some releases also return the log-sum-exps.
        heads: Tensor = output[0] if isinstance(output, tuple) else output
        return heads.transpose(0, 1).flatten(2)


def whole(documents: Documents | None) -> DocumentRange | None:
    """Return the only range in `documents`, or None if `documents` is None. The context-parallel
    size must be 1."""
    return None if documents is None else documents.parts[0]


def gather_sequence(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """All-gather keys and values `[s, b, groups, d]` of the whole sequence.

    `key` and `value` `[s / ranks, b, groups, d]` are this rank's part of the sequence. The backward
    pass sums gradients across ranks.
    """
    sizes = (key.shape[-1], value.shape[-1])
    parts = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=group)
    key, value = in_sequence_order(parts, group.size()).split(sizes, -1)
    return key, value


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, documents: DocumentRange | None = None
) -> Tensor:
    """Return the attention output `[s, b, heads * d]` for queries at the last s of t positions.

    query        `[s, b, heads, d]`
    key, value   `[t, b, groups, d]`, t >= s
    documents    boundaries that attention does not cross; None: no boundaries
    """
    few = key.shape[0] * key.shape[-1] <= SMALL_KEYS
    if is_slow(query) or (few and query.is_cpu and query.dtype == torch.bfloat16):
        q, k, v = (x.float() for x in (query, key, value))
        return causal_attention(q, k, v, scale, documents).to(query.dtype)
    if documents is not None and query.is_cuda and query.dtype != torch.float64:
        return varying_attention(query, key, value, scale, documents)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, d]
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and q.dtype == torch.float32:
        # The only fused kernel for float32 does not support grouped queries.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        grouped = False
    mask: Any = None
    if documents is not None:
        rows, keys = slice(0, q.shape[2]), slice(0, k.shape[2])
        hidden = hidden_keys(rows, keys, k.shape[2] - q.shape[2], None, q.device)
        mask = ~(hidden | other_documents(rows, keys, documents))[:, None]
    elif q.shape[2] != k.shape[2]:
        # Imported lazily, because the import loads the compiler.
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(q.shape[2], k.shape[2])
    with allowed_kernels(q):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
    return out.permute(2, 0, 1, 3).flatten(2)  # [s, b, heads * d]


def allowed_kernels(query: Tensor) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that restricts attention on GPUs to fused kernels.

    Within the context, attention raises RuntimeError if no fused kernel supports the inputs;
    PyTorch would otherwise silently fall back to materialising the scores `[s, s]`. All kernels are
    allowed on CPUs, and for float64, which no fused kernel supports.
    """
    if not query.is_cuda or query.dtype == torch.float64:
        return contextlib.nullcontext()
    return sdpa_kernel(FUSED, set_priority=True)


def attention_kernel(
    heads: int,
    groups: int,
    key_size: int,
    value_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    documents: bool = False,
) -> str:
    """Return the name of the kernel that `causal_attention` uses for `heads` query heads and
    `groups` KV heads.

    With `documents` on a GPU, the name is `VARYING`. Otherwise, the name is flash_attention,
    cudnn_attention, efficient_attention or math. Raises RuntimeError if no allowed kernel supports
    the inputs.
    """
    if documents and device.type == "cuda":
        head = max(key_size, value_size)
        if dtype.itemsize != 2 or head > LARGEST_HEAD:
            raise RuntimeError(
                f"a document mask requires {VARYING}, which supports 16-bit dtypes and head "
                f"dimensions up to {LARGEST_HEAD}, got {dtype} and {head}"
            )
        return VARYING
    groups = heads if device.type == "cuda" and dtype == torch.float32 else groups
    options: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": True}
    query = torch.empty(1, heads, 128, key_size, **options)
    key = torch.empty(1, groups, 128, key_size, **options)
    value = torch.empty(1, groups, 128, value_size, **options)
    with allowed_kernels(query):
        choice = torch._fused_sdp_choice(
            query, key, value, is_causal=True, enable_gqa=heads != groups
        )
    if choice not in KERNELS:
        raise RuntimeError("No available kernel.")
    return KERNELS[choice]


def largest_causal_score(
    query: Tensor,
    key: Tensor,
    scale: float,
    window: int | None = None,
    documents: DocumentRange | None = None,
) -> Tensor:
    """Return the largest attention score `[]`, excluding masked scores, in float32 or wider.

    Scores are computed one block of queries at a time, so no `[s, t]` matrix is materialised. With
    `window`, a query attends to the last `window` keys up to its own position. With `documents`, a
    query attends only to keys in its own document.
    """
    s, t, groups = query.shape[0], key.shape[0], key.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    best = query.new_full((), -math.inf, dtype=dtype)
    for rows, seen in score_blocks(s, t, window):
        part = query[rows].to(dtype).unflatten(2, (groups, -1))
        scores = torch.einsum("sbgrd,tbgd->bgrst", part, key[seen].to(dtype))
        scores.masked_fill_(hidden_keys(rows, seen, t - s, window, scores.device), -math.inf)
        if documents is not None:
            scores.masked_fill_(other_documents(rows, seen, documents)[:, None, None], -math.inf)
        best = torch.maximum(best, scale * scores.amax())
    return best


def score_blocks(s: int, t: int, window: int | None = None) -> Iterator[tuple[slice, slice]]:
    """Yield (range of queries, range of keys visible to these queries) for each block of queries.
    The queries are at the last s of t positions."""
    for first in range(0, s, ROWS):
        last = min(first + ROWS, s)
        oldest = 0 if window is None else max(0, t - s + first - window + 1)
        yield slice(first, last), slice(oldest, t - s + last)


def hidden_keys(
    rows: slice, seen: slice, offset: int, window: int | None, device: torch.device
) -> Tensor:
    """Return a mask `[rows, keys]` of the keys that the causal mask or the window hides from a
    block's queries. Query 0 is at position `offset`."""
    query = torch.arange(rows.start, rows.stop, device=device)[:, None] + offset
    key = torch.arange(seen.start, seen.stop, device=device)
    hidden = key > query
    return hidden if window is None else hidden | (key <= query - window)


def other_documents(rows: slice, seen: slice, documents: DocumentRange) -> Tensor:
    """Return a mask `[b, rows, keys]` of the keys that precede each query's document."""
    key = torch.arange(seen.start, seen.stop, device=documents.firsts.device)
    return key < documents.firsts[:, rows, None]


def documents_of(firsts: Tensor, move: Move, *, rank: int = 0, size: int = 1) -> Documents:
    """Return the document boundaries for context rank `rank` of `size`.

    `firsts` `[b, s]`, in host memory, covers whole sequences. For each token, `firsts` contains the
    position in the sequence at which the token's document starts. `move` copies a tensor to the
    device.
    """
    length = firsts.shape[1]
    context = {"rank": rank, "size": size}
    positions = context_part(torch.arange(length) - firsts, 1, **context)
    chunks = context_chunks(length, **context)
    parts = [document_range(firsts[:, c.start : c.stop], c, move) for c in chunks]
    return Documents(
        qkv_format="sbhd",
        max_seqlen_q=length,
        max_seqlen_kv=length,
        positions=move(positions),
        parts=parts,
    )


def document_range(firsts: Tensor, chunk: range, move: Move) -> DocumentRange:
    """Return the document boundaries for the queries in `chunk`, with the keys up to the end of
    `chunk`."""
    counts = []  # numbers of queries and of keys in each document, `[documents, 2]`
    for sequence in firsts:
        starts = sequence.unique_consecutive()
        if starts[0] > 0:
            counts.append(starts.new_tensor([[0, starts[0]]]))  # keys that no query attends to
        ends = F.pad(starts[1:], (0, 1), value=chunk.stop)
        counts.append(torch.stack([ends - starts.clamp(min=chunk.start), ends - starts], 1))
    pairs = torch.cat(counts)
    cumulative = F.pad(pairs.cumsum(0), (0, 0, 1, 0)).int()
    queries, keys = (move(x.contiguous()) for x in cumulative.unbind(1))
    most_queries, most_keys = pairs.amax(0).tolist()
    return DocumentRange(move(firsts), queries, keys, most_queries, most_keys)


def varying_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, documents: DocumentRange
) -> Tensor:
    """Return the attention output `[s, b, heads * d]` for queries at the last s of t positions.

    query        `[s, b, heads, d]`
    key, value   `[t, b, groups, d]`, t >= s
    documents    boundaries that attention does not cross

    All heads are padded to the same dimension, a multiple of `ALIGNMENT`.
    """
    # Imported lazily, because the import loads the compiler.
    from torch.nn.attention.varlen import varlen_attn

    size = max(query.shape[-1], value.shape[-1])
    size += -size % ALIGNMENT
    # [b s, heads, size]; F.pad copies even if there is nothing to pad
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
        documents.queries,
        documents.keys,
        documents.most_queries,
        documents.most_keys,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)
    out = out[..., : value.shape[-1]].unflatten(0, (query.shape[1], -1))
    return out.transpose(0, 1).flatten(2)  # [s, b, heads * d]
