"""Costs of PyTorch's operations on a device: launches, moved bytes, FLOPs, and host waits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from parallel.plan.devices import (
    ATTENTION,
    EIGEN_ROW,
    Device,
    factor_share,
    product_share,
    varying_share,
)
from training.rehearsal.trace import size_of

SILENT: Final = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted",
    "detach", "alias", "lift_fresh", "lift", "_unsafe_view", "_reshape_alias", "set_", "resize_",
    "view", "is_same_size", "size", "stride", "sym_size", "sym_stride", "sym_numel",
    "sym_storage_offset", "record_stream", "device", "is_contiguous", "dim", "is_pinned",
    "_is_zerotensor", "result_type", "_has_compatible_shallow_copy_type", "requires_grad_",
}  # fmt: skip
"""Operations that launch no kernel although they are not views."""

HEADS_INSIDE: Final = (
    torch.ops.aten._efficient_attention_forward, torch.ops.aten._efficient_attention_backward,
)  # fmt: skip
"""Operations on `[batch, s, heads, d]` whose FLOP formula expects `[batch, heads, s, d]`."""

FLASH: Final = (
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_backward,
)  # fmt: skip
"""FlashAttention 2, which reaches a smaller share of the peak than cuDNN on Hopper and newer
GPUs."""

VARYING: Final = "torch_attn"
"""Namespace of FlashAttention 2's operations on documents, whose lengths are values of tensors. The
operations exist after importing a module that loads the compiler."""

CAUSAL: Final = (
    *FLASH,
    torch.ops.aten._scaled_dot_product_cudnn_attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward,
    *HEADS_INSIDE,
)
"""Fused attention, always under a causal mask here."""

PRODUCTS: Final = (
    torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm,
)  # fmt: skip
"""Products whose last two tensors are multiplied."""

READ_BY_HOST: Final = {
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2",
    "unique_dim", "unique_consecutive", "bincount", "_linalg_eigh", "_linalg_svd", "linalg_eig",
    "linalg_lstsq", "linalg_cholesky", "linalg_inv", "linalg_solve", "linalg_qr_sync",
}  # fmt: skip
"""Operations that make the host wait: for a result, for a size, or for an error check."""

GATHERS: Final = {"embedding", "index_select", "gather", "index", "take"}
"""Operations that read as many elements of their first argument as they return."""

OVERWRITES: Final = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_"}
"""In-place operations that do not read the memory they write."""

LIST_TENSORS: Final = 110, 64, 48, 36, 30
"""Largest number of tensors in one launch of an operation on 1, 2, ... lists, as in PyTorch's
multi_tensor_apply."""
LIST_CHUNK: Final = 65536
"""Elements of a block of such a launch."""
LIST_BLOCKS: Final = 320
"""Largest number of blocks of such a launch."""

OPERANDS: Final = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
"""Names in `Device.peak` by dtype of the operands."""


@dataclass(frozen=True)
class Kind:
    """Properties of an operation from its schema.

    silent    whether it launches nothing
    written   positions and names of arguments that it writes
    """

    name: str
    silent: bool
    written: frozenset[int | str]


@cache
def kind_of(function: OpOverload) -> Kind:
    """Return the properties of an operation from its schema."""
    name = function.overloadpacket.__name__
    schema = function._schema
    written: set[int | str] = set()
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {i, argument.name}
    silent = name in SILENT or function.is_view or function.namespace == "prim"
    return Kind(name, silent, frozenset(written))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument or a result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def arguments(
    kind: Kind, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operation reads, and the arguments that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for key, value in (*enumerate(args), *kwargs.items()):
        (writes if key in kind.written else reads).extend(tensors_in(value))
    if kind.name not in OVERWRITES:  # arguments in positions (not `out=`) are read and written
        for i, value in enumerate(args):
            reads += tensors_in(value) if i in kind.written else []
    return reads, writes


def moved_bytes(kind: Kind, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
    """Return the bytes that an operation moves: every argument read once, every result written
    once."""
    written = sum(size_of(x) for x in writes)
    if kind.name in GATHERS:
        return 2 * written + sum(size_of(x) for x in reads[1:])
    return written + sum(size_of(x) for x in reads)


IN_PLACE: Final = {
    torch.ops.aten.addmm_: torch.ops.aten.addmm,
    torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm,
}
"""In-place products, for which PyTorch has no FLOP formula, and the operations whose formula
applies."""


def _cholesky_flops(x: Tensor) -> float:
    """Return the FLOPs of the factors of `x` `[..., n, n]`."""
    return x.numel() * x.shape[-1] / 3


def _triangular_flops(factor: Tensor, b: Tensor) -> float:
    """Return the FLOPs of the solutions `[..., n, columns]` of triangular systems."""
    return float(b.numel() * factor.shape[-1])


FACTORISATIONS: Final[dict[Any, Callable[..., float]]] = {
    torch.ops.aten.linalg_cholesky_ex: _cholesky_flops,
    torch.ops.aten.linalg_solve_triangular: _triangular_flops,
}
"""Functions from the tensors to the FLOPs of other operations that multiply matrices."""

EIGENVALUES: Final = (torch.ops.aten._linalg_eigh, torch.ops.aten._linalg_svd)
"""Eigenvalue and singular value problems, which process columns in sequence."""


def share_of(
    device: Device, function: OpOverload, operands: str, reads: Sequence[Tensor]
) -> float | None:
    """Return the share of the peak that an operation with matrix products reaches.

    None stands for the share that a large product reaches.
    """
    packet = IN_PLACE.get(function.overloadpacket, function.overloadpacket)
    if function.namespace == VARYING:
        return varying_share(device)
    if packet in CAUSAL:
        return varying_share(device) if packet in FLASH else ATTENTION
    if packet in FACTORISATIONS:
        return factor_share(reads[0].shape[-1])
    if packet in PRODUCTS:
        left, right = reads[-2:]
        return product_share(device, operands, (left.shape[-2], *right.shape[-2:]))
    if packet is torch.ops.aten._grouped_mm:
        left, right = reads[:2]
        parts = max(x.shape[0] if x.ndim == 3 else 1 for x in (left, right))
        sides = (left.shape[-2], *right.shape[-2:])
        cut = 0 if right.ndim == 3 else 2 if left.ndim == 3 else 1
        return product_share(
            device, operands, [n / parts if i == cut else n for i, n in enumerate(sides)]
        )
    return None


def waiting_of(function: OpOverload, reads: Sequence[Tensor]) -> float:
    """Return the seconds that the columns of eigenvalue problems take, matrix by matrix."""
    if function.overloadpacket not in EIGENVALUES:
        return 0.0
    return EIGEN_ROW * reads[0].numel() / max(reads[0].shape[-2:])


def flops_of(function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
    """Return the FLOPs of an operation with matrix products, or 0 for all others."""
    packet = IN_PLACE.get(function.overloadpacket, function.overloadpacket)
    if packet in FACTORISATIONS:
        return FACTORISATIONS[packet](*(x for x in args if isinstance(x, Tensor)))
    if packet is torch.ops.aten._grouped_mm:
        left, right = args[:2]
        inner = left.shape[-1] / (out.shape[0] if out.ndim == 3 else 1)
        return 2.0 * out.numel() * inner
    formula = flop_registry.get(packet)
    if packet in PRODUCTS:
        # The result's dtype is left out, as the formulas do not accept it.
        args, kwargs = [x for x in args if isinstance(x, Tensor)], {}
    if packet in HEADS_INSIDE:
        args = [x.transpose(1, 2) if isinstance(x, Tensor) and x.ndim == 4 else x for x in args]
    # Fused kernels skip the half of the scores that the causal mask hides.
    part = 0.5 if packet in CAUSAL or function.namespace == VARYING else 1.0
    return 0.0 if formula is None else part * float(formula(*args, **kwargs, out_val=out))


def operands_of(function: OpOverload, reads: Sequence[Tensor]) -> str:
    """Return the dtype of a product's operands, by its name in `Device.peak`."""
    packet = IN_PLACE.get(function.overloadpacket, function.overloadpacket)
    for tensor in reads[-2:] if packet in PRODUCTS else reads:
        if tensor.dtype in OPERANDS:
            return OPERANDS[tensor.dtype]
    return "fp32"


def kernels_of(kind: Kind, args: Sequence[Any]) -> int:
    """Return the approximate number of kernels of an operation.

    A launch on lists handles a limited number of tensors and of chunks. If the tensors have several
    dtypes, every tensor has its own launch, except in copies.
    """
    lists = [
        value
        for value in args
        if isinstance(value, list | tuple)
        and value
        and all(isinstance(each, Tensor) for each in value)
    ]
    if not kind.name.startswith(("_foreach_", "_fused_")) or not lists:
        return 1
    types = {tensor.dtype for each in lists for tensor in each}
    if len(types) > 1 and kind.name.startswith("_foreach_") and kind.name != "_foreach_copy_":
        return len(lists[0])
    if kind.name.startswith("_fused_"):
        lists = lists[:-1]  # a list of step counts is not a list of elements
    chunks = sum(-(-int(tensor.numel()) // LIST_CHUNK) for tensor in lists[0])
    most = LIST_TENSORS[min(len(lists), len(LIST_TENSORS)) - 1]
    launches = max(-(-len(lists[0]) // most), -(-chunks // LIST_BLOCKS))
    # One more kernel zeroes the norms before, and one sums them over chunks after.
    return launches + 2 if kind.name == "_foreach_norm" else launches
