"""Functions that torch.compile makes kernels of: one launch forward, one or more backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from training.rehearsal.device_tensors import DeviceTensors
from training.rehearsal.operations import size_of
from training.rehearsal.replacement import put
from training.rehearsal.trace import Trace


def install(trace: Trace, mode: DeviceTensors) -> None:
    """Replace `torch.compile`, for the life of this process.

    A compiled function reads its arguments and writes its results once. Its backward pass reads the
    arguments, which is all that is kept of it, and the results' gradients; once more for each
    argument that is smaller than the largest, over whose rows a kernel of its own sums.
    """

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, function: Callable[..., Any], *arguments: Any) -> Any:
            with mode.untraced():
                results = function(*arguments)
            reads = [x for x in arguments if isinstance(x, Tensor)]
            launch(name_of(function), reads, results if isinstance(results, tuple) else [results])
            ctx.name, ctx.places = name_of(function), [isinstance(x, Tensor) for x in arguments]
            ctx.save_for_backward(*reads)
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            kept = iter(ctx.saved_tensors)
            needed = ctx.needs_input_grad[1:]
            arguments: list[Any] = [next(kept) if place else None for place in ctx.places]
            wanted = [x for x, need in zip(arguments, needed, strict=True) if need]
            made = {id(x): torch.empty_like(x) for x in wanted}
            reads = [*(g for g in gradients if g is not None), *ctx.saved_tensors]
            large = max(x.numel() for x in reads)
            groups = [[x for x in wanted if x.numel() == large]]
            groups += [[x] for x in wanted if x.numel() < large]
            for group in filter(None, groups):
                launch(f"{ctx.name}_backward", reads, [made[id(x)] for x in group])
            return None, *(
                made[id(x)] if need else None for x, need in zip(arguments, needed, strict=True)
            )

    def launch(name: str, reads: Any, writes: Any) -> None:
        size = sum(size_of(each) for each in (*reads, *writes))
        trace.launch(name, reads, writes, size=size)

    def compiled(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if not any(isinstance(x, Tensor) and x.is_cuda for x in arguments):
                return function(*arguments)
            return Fused.apply(function, *arguments)  # type: ignore[no-untyped-call]

        return call

    put(torch, "compile", compiled)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a kernel that is made of a function."""
    return f"compiled_{getattr(function, '__name__', type(function).__name__)}"
