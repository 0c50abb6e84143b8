"""Costs of PyTorch operations on a device: launches, bytes moved, FLOPs and host syncs."""

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
    Work,
    factor_share,
    product_share,
    varying_share,
)
from training.rehearsal.trace import size_of

SILENT: Final = {
    "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted",
    "lift", "_unsafe_view", "set_", "resize_", "is_same_size",
}  # fmt: skip
"""Names of operations that launch no kernel although they are not views."""

HEADS_INSIDE: Final = (
    torch.ops.aten._efficient_attention_forward, torch.ops.aten._efficient_attention_backward,
)  # fmt: skip
"""Operations on `[batch, s, heads, d]` whose FLOP formulas expect `[batch, heads, s, d]`."""

FLASH: Final = (
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_backward,
)  # fmt: skip
"""FlashAttention 2, which achieves a smaller fraction of the peak than cuDNN on Hopper and newer
GPUs."""

VARYING: Final = "torch_attn"
"""Namespace of FlashAttention 2's variable-length operations, which take document lengths as
tensors. The namespace only exists after importing a module that loads torch's compiler."""

CAUSAL: Final = (
    *FLASH,
    torch.ops.aten._scaled_dot_product_cudnn_attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward,
    *HEADS_INSIDE,
)
"""Operations of fused attention. Spectrain always uses these operations with a causal mask."""

PRODUCTS: Final = (
    torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm,
)  # fmt: skip
"""Operations that multiply their last two tensor arguments."""

GATHERS: Final = {"embedding", "index_select", "gather", "index", "take"}
"""Names of operations that read only as many elements of their first argument as they return."""

OVERWRITES: Final = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_"}
"""Names of in-place operations that do not read the memory that they write to."""

LIST_TENSORS: Final = 110, 64, 48, 36, 30
"""Maximum number of tensors per list and launch, for operations on 1, 2, ... lists of tensors, as
in PyTorch's multi_tensor_apply."""
LIST_CHUNK: Final = 65536
"""Number of elements per block of an operation on lists of tensors."""
LIST_BLOCKS: Final = 320
"""Maximum number of blocks per launch of an operation on lists of tensors."""

OPERANDS: Final = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
"""Maps the dtype of operands to a key of `Device.peak`."""


@dataclass(frozen=True)
class Kind:
    """Properties of an operation, derived from its schema.

    silent    whether the operation launches no kernel
    written   positions and names of the arguments written by the operation
    """

    name: str
    silent: bool
    written: frozenset[int | str]


@cache
def kind_of(function: OpOverload) -> Kind:
    """Derive the properties of an operation from its schema."""
    name = function.overloadpacket.__name__
    schema = function._schema
    written: set[int | str] = set()
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {i, argument.name}
    silent = name in SILENT or function.is_view or function.namespace == "prim"
    return Kind(name, silent, frozenset(written))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an argument or result, including nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def arguments(
    kind: Kind, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensor arguments that an operation reads, and those that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for key, value in (*enumerate(args), *kwargs.items()):
        (writes if key in kind.written else reads).extend(tensors_in(value))
    if kind.name not in OVERWRITES:  # arguments written in place (other than `out=`) are also read
        for i, value in enumerate(args):
            reads += tensors_in(value) if i in kind.written else []
    return reads, writes


IN_PLACE: Final = {
    torch.ops.aten.addmm_: torch.ops.aten.addmm,
    torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm,
}
"""Maps in-place matmuls, for which PyTorch has no FLOP formula, to the operation whose formula
applies."""


FACTORISATIONS: Final[dict[Any, Callable[..., float]]] = {
    torch.ops.aten.linalg_cholesky_ex: lambda x: x.numel() * x.shape[-1] / 3,
    torch.ops.aten.linalg_solve_triangular: lambda factor, b: float(b.numel() * factor.shape[-1]),
}
"""Maps operations for which PyTorch has no FLOP formula to functions that compute their FLOPs from
the tensor arguments: Cholesky factorisations of x `[..., n, n]`, and triangular solves with
right-hand sides `[..., n, columns]`."""

EIGENVALUES: Final = (
    torch.ops.aten._linalg_eigh, torch.ops.aten._linalg_svd, torch.ops.aten.linalg_eig,
)  # fmt: skip
"""Eigenvalue and singular value decompositions, which process columns sequentially and are followed
by a host-side error check."""


def work_of(
    device: Device,
    function: OpOverload,
    kind: Kind,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    reads: Sequence[Tensor],
    writes: Sequence[Tensor],
    out: Any,
) -> Work:
    """Return the work of an operation that reads each tensor in `reads` once and writes each tensor
    in `writes` once. `out` is the result of the operation."""
    packet = IN_PLACE.get(function.overloadpacket, function.overloadpacket)
    multiplied = reads[-2:] if packet in PRODUCTS else reads
    operands = next((OPERANDS[x.dtype] for x in multiplied if x.dtype in OPERANDS), "fp32")
    written = sum(size_of(x) for x in writes)
    if kind.name in GATHERS:
        read = written + sum(size_of(x) for x in reads[1:])
    else:
        read = sum(size_of(x) for x in reads)
    flops = flops_of(function, args, kwargs, out)
    share = share_of(device, function, operands, reads) if flops else None
    waiting = 0.0
    if packet in EIGENVALUES:  # processes columns sequentially
        waiting = EIGEN_ROW * reads[0].numel() / max(reads[0].shape[-2:])
    return Work(written + read, flops, operands, share, kernels_of(kind, args), waiting)


def share_of(
    device: Device, function: OpOverload, operands: str, reads: Sequence[Tensor]
) -> float | None:
    """Return the fraction of peak FLOP/s that an operation with matmuls achieves.

    None stands for the fraction that a large matmul achieves.
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


def flops_of(function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
    """Return the FLOPs of an operation with matmuls, or 0 for other operations."""
    packet = IN_PLACE.get(function.overloadpacket, function.overloadpacket)
    if packet in FACTORISATIONS:
        return FACTORISATIONS[packet](*(x for x in args if isinstance(x, Tensor)))
    if packet is torch.ops.aten._grouped_mm:
        left, right = args[:2]
        inner = left.shape[-1] / (out.shape[0] if out.ndim == 3 else 1)
        return 2.0 * out.numel() * inner
    formula = flop_registry.get(packet)
    if packet in PRODUCTS:
        # The formulas only accept tensors, not a result dtype.
        args, kwargs = [x for x in args if isinstance(x, Tensor)], {}
    if packet in HEADS_INSIDE:
        args = [x.transpose(1, 2) if isinstance(x, Tensor) and x.ndim == 4 else x for x in args]
    # Fused kernels skip the masked half of the scores.
    part = 0.5 if packet in CAUSAL or function.namespace == VARYING else 1.0
    return 0.0 if formula is None else part * float(formula(*args, **kwargs, out_val=out))


def kernels_of(kind: Kind, args: Sequence[Any]) -> int:
    """Return the approximate number of kernels launched by an operation.

    For an operation on lists of tensors, the numbers of tensors and blocks per launch are limited.
    If dtypes differ, each tensor gets its own launch, except in copies.
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
        lists = lists[:-1]  # the last list holds step counts
    chunks = sum(-(-int(tensor.numel()) // LIST_CHUNK) for tensor in lists[0])
    per_launch = LIST_TENSORS[min(len(lists), len(LIST_TENSORS)) - 1]
    launches = max(-(-len(lists[0]) // per_launch), -(-chunks // LIST_BLOCKS))
    # Two more kernels zero the norms beforehand and sum them over blocks afterwards.
    return launches + 2 if kind.name == "_foreach_norm" else launches
