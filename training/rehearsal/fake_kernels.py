"""Mimic kernels and tensor types that differ on a GPU.

Without a GPU, PyTorch chooses different attention kernels. PyTorch builds without CUDA run a norm
as five operations. Launches of Spectrain's Triton kernels and liger-kernel's loss kernels are
recorded. If requested, each specialisation of Spectrain's kernels is compiled once.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, bias

from models.blocks.activation import ACTIVATIONS
from models.blocks.experts import Counts, SortedDispatcher
from parallel.plan.devices import SYMMETRIC, Work
from spectral.kernels.dispatch import has_triton
from training.machine.backends import has_liger
from training.rehearsal.device_tensors import DeviceTensors
from training.rehearsal.operations import OPERANDS
from training.rehearsal.program import call_site, put
from training.rehearsal.trace import Launch, Trace, size_of

LARGEST_FLASH_HEAD = 256
ALIGNMENT = 8
LOWER_RIGHT = 2
"""Argument of the kernels for a causal mask aligned to the last query and key."""


@dataclass(frozen=True)
class LowerRight:
    """A causal mask aligned to the last query and key. The class stands in for PyTorch's mask type,
    which fake tensors do not support."""

    queries: int
    keys: int


def install(trace: Trace, mode: DeviceTensors, *, compiled: bool = False) -> None:
    """Until this process exits, replace attention and its kernel selection, norms, compiled
    functions, Triton kernels, expert routing and `Module.to`. If `compiled` is true, each
    specialisation of Spectrain's Triton kernels is compiled for the simulated device."""
    kernels = FusedAttention(newer=trace.device.capability >= (9, 0))
    put(F, "scaled_dot_product_attention", kernels.attention)
    put(torch, "_fused_sdp_choice", kernels.choice)
    put(bias, "causal_lower_right", LowerRight)
    install_fused(trace, mode)
    install_triton(trace, compiled=compiled)
    if has_liger():
        made = ("EXP_ptr", "pred_ptr", "sum_exp_ptr")
        for part, names in (("forward", {"made": made}), ("backward", {"changed": ("EXP_ptr",)})):
            name = f"liger_vocab_parallel_ce_{part}_kernel"
            put(liger_kernels(), name, Kernel(trace, name, **names))
    install_experts(trace)
    put(nn.Module, "to", moved)


def takes_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether flash attention supports the inputs. Flash attention requires a 16-bit dtype
    and the same head dimension, at most 256, for all inputs."""
    sizes = {x.shape[-1] for x in (query, key, value)}
    return query.dtype.itemsize == 2 and len(sizes) == 1 and max(sizes) <= LARGEST_FLASH_HEAD


@dataclass(frozen=True)
class FusedAttention:
    """Fused attention kernels. `newer` is true for Hopper and later generations."""

    newer: bool

    def choice(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> int:
        """Return the value in `SDPBackend` of the kernel chosen for these inputs."""
        if not takes_flash(query, key, value):
            return int(SDPBackend.EFFICIENT_ATTENTION.value)
        flash = SDPBackend.CUDNN_ATTENTION if self.newer else SDPBackend.FLASH_ATTENTION
        return int(flash.value)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | LowerRight | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Run the fused kernel for queries `[batch, heads, s, d]`, keys and values `[batch, groups,
        t, d]`. Raises RuntimeError if no kernel supports the inputs."""
        lower_right = isinstance(attn_mask, LowerRight)
        if attn_mask is not None and not lower_right:
            raise RuntimeError("no fused kernel supports a mask tensor")
        flash, size = takes_flash(query, key, value), query.shape[-1]
        differentiable = query.requires_grad and torch.is_grad_enabled()
        aten = torch.ops.aten
        output: Tensor
        if flash and self.newer and not lower_right:
            output = aten._scaled_dot_product_cudnn_attention(
                query, key, value, None, differentiable, 0.0, is_causal, False, scale=scale
            )[0]
        elif flash:
            padding = (0, -size % ALIGNMENT)
            q, k, v = (F.pad(x, padding) if padding[1] else x for x in (query, key, value))
            output = aten._scaled_dot_product_flash_attention(
                q, k, v, 0.0, is_causal or lower_right, False, scale=scale or size**-0.5
            )[0][..., :size]
        elif enable_gqa and query.shape[1] != key.shape[1]:
            raise RuntimeError(
                "No available kernel: flash attention does not support grouped heads"
            )
        elif lower_right:
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            output = aten._efficient_attention_forward(
                q, k, v, None, None, None, None, None, 0.0, LOWER_RIGHT, True, scale=scale
            )[0].transpose(1, 2)
        else:
            output = aten._scaled_dot_product_efficient_attention(
                query, key, value, None, differentiable, 0.0, is_causal, scale=scale
            )[0]
        return output


@dataclass(frozen=True)
class FusedFunction:
    """A function that launches one kernel in the forward pass and one in the backward pass.

    per_row   whether one number per row is saved for the backward pass
    """

    name: str
    function: Callable[..., Any]
    per_row: bool = False


def install_fused(trace: Trace, mode: DeviceTensors) -> None:
    """Until this process exits, replace `torch.compile`. Also replace `rms_norm`, but only for
    device tensors.

    A fused function reads its arguments once and writes its results once. The function's backward
    pass reads the saved arguments and the gradients of the results, and writes the gradients of the
    arguments. The same kernel also writes the gradient of a gain, because inductor reduces over
    rows and over columns in one kernel.
    """

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, fused: FusedFunction, *arguments: Any) -> Any:
            with mode.untraced():
                results = fused.function(*arguments)
            reads = [x for x in arguments if isinstance(x, Tensor)]
            writes = list(results) if isinstance(results, tuple) else [results]
            rows = (*reads[0].shape[:-1], 1)
            numbers = [reads[0].new_empty(rows, dtype=torch.float32)] if fused.per_row else []
            trace.launch(Launch.moving(fused.name, reads, writes + numbers))
            ctx.fused, ctx.is_tensor = fused, [isinstance(x, Tensor) for x in arguments]
            ctx.save_for_backward(*reads, *numbers)
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            kept = iter(ctx.saved_tensors)
            needed = ctx.needs_input_grad[1:]
            arguments: list[Any] = [next(kept) if tensor else None for tensor in ctx.is_tensor]
            differentiated = [x for x, need in zip(arguments, needed, strict=True) if need]
            made = {id(x): torch.empty_like(x) for x in differentiated}
            reads = [*(g for g in gradients if g is not None), *ctx.saved_tensors]
            function = ctx.fused.function
            if any(a.gated and function in (a.block, a.scaled) for a in ACTIVATIONS.values()):
                # To concatenate the gradients of the gate and up projections, inductor reads the
                # gradient of the result `[..., d]` and the gate, the first half of `[..., 2 d]`,
                # a second time.
                reads += [reads[0], reads[1].chunk(2, -1)[0]]
            trace.launch(Launch.moving(f"{ctx.fused.name}_backward", reads, list(made.values())))
            return None, *(
                made[id(x)] if need else None for x, need in zip(arguments, needed, strict=True)
            )

    def compiled(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        name = getattr(function, "__name__", type(function).__name__)
        fused = FusedFunction(f"compiled_{name}", function)

        def call(*arguments: Any) -> Any:
            if not any(isinstance(x, Tensor) and x.is_cuda for x in arguments):
                return function(*arguments)
            return Fused.apply(fused, *arguments)  # type: ignore[no-untyped-call]

        return call

    plain = F.rms_norm
    norm = FusedFunction("_fused_rms_norm", lambda x, _: torch.empty_like(x), per_row=True)

    def rms_norm(
        x: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        """Stand in for `torch.nn.functional.rms_norm`, which is fused if gain and input have the
        same dtype."""
        if not x.is_cuda or (weight is not None and weight.dtype != x.dtype):
            return plain(x, list(normalized_shape), weight, eps)
        normed: Tensor = Fused.apply(norm, x, weight)  # type: ignore[no-untyped-call]
        return normed

    put(torch, "compile", compiled)
    put(F, "rms_norm", rms_norm)


def install_experts(trace: Trace) -> None:
    """Until this process exits, make MoE layers route the same number of rows to every expert.

    In a real run, the numbers of rows depend on the weights.
    """

    def counts_on_host(dispatcher: SortedDispatcher, *counts: Tensor) -> list[Counts]:
        trace.read("rows of each expert")
        order, experts = dispatcher.order, dispatcher.config.num_moe_experts
        assert order is not None and experts is not None
        rows = len(order)
        each = [rows // experts + (i < rows % experts) for i in range(experts)]
        local, parts = dispatcher.local, dispatcher.tp_size
        if dispatcher.ranks == 1:
            return [[each]]
        outgoing = [each[rank // parts * local :][:local] for rank in range(dispatcher.ranks)]
        rows_of_rank = outgoing[dispatcher.tp_ep_group.rank()]
        return [outgoing, [rows_of_rank] * dispatcher.ranks]

    put(SortedDispatcher, "counts_on_host", counts_on_host)


def moved(module: nn.Module, device: torch.device) -> nn.Module:
    """Stand in for `module.to(device)`, which cannot convert a real parameter to a fake one in
    place.

    Attributes that the fake parameter lacks, such as Megatron's tensor-parallel attributes, are
    copied from the real parameter.
    """
    for each in module.modules():
        for name, parameter in list(each._parameters.items()):
            if parameter is not None and parameter.device.type != device.type:
                new = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
                vars(new).update({k: v for k, v in vars(parameter).items() if k not in vars(new)})
                each._parameters[name] = new
        for name, buffer in list(each._buffers.items()):
            if buffer is not None and buffer.device.type != device.type:
                each._buffers[name] = buffer.to(device)
    return module


class HostArgumentError(RuntimeError):
    """Raised when a host tensor is passed to a device kernel."""


def install_triton(trace: Trace, *, compiled: bool) -> None:
    """Until this process exits, record launches of Spectrain's Triton kernels. If `compiled` is
    true, each specialisation is compiled for the simulated device."""
    if not has_triton():
        return
    from spectral.kernels import launches

    major, minor = trace.device.capability
    compiled_kinds: set[object] = set()

    def on_launch(launch: launches.Launch) -> None:
        for tensor in launch.read:
            if not tensor.is_cuda:
                raise HostArgumentError(
                    f"{launch.name} at {call_site()} requires tensors on the device, got a tensor "
                    f"on {tensor.device}"
                )
        if compiled and launch.specialisation not in compiled_kinds:
            compiled_kinds.add(launch.specialisation)
            launch.compile_for(10 * major + minor)
        written = launch.written
        read = [x for x in launch.read if not any(x is w for w in written)]
        kind = OPERANDS.get((read or written)[0].dtype, "fp32")
        thrice = launch.arguments.get("PRECISION") == "tf32x3"  # these matmuls run on tensor cores
        work = Work(
            sum(size_of(x) for x in (*read, *written, *launch.changed)),
            launch.flops * (3 if thrice else 1),
            "tf32" if kind == "fp32" and thrice else kind,
            share=SYMMETRIC,
        )
        trace.launch(Launch(launch.name, read, written, work, triton=True))

    launches.observe(on_launch)


@dataclass(frozen=True)
class Kernel:
    """Stand-in for a Triton kernel, called as `kernel[grid](NAME=value, ...)`.

    made      names of tensors that the kernel only writes
    changed   names of tensors that the kernel reads and writes
    """

    trace: Trace
    name: str
    made: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.launch

    def launch(self, **arguments: Any) -> None:
        """Record a launch that accesses each tensor in `arguments` once."""
        tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
        read = [x for name, x in tensors.items() if name not in self.made]
        written = [tensors[name] for name in (*self.made, *self.changed)]
        self.trace.launch(replace(Launch.moving(self.name, read, written), triton=True))


def liger_kernels() -> ModuleType:
    """Import and return liger-kernel's loss module. The import takes seconds."""
    return importlib.import_module("liger_kernel.ops.vocab_parallel_cross_entropy")
