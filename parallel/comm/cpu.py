"""Megatron-core on a host without CUDA: all adjustments are in this file.

Megatron-core asks `torch.cuda` for the current device, streams and events unconditionally,
its schedules create one tensor with the literal device "cuda", and its random-state tracker needs a
CUDA generator. PyTorch's CPU backend has no-op counterparts of all of these. On a host with CUDA
only what fails without Transformer Engine is changed, so the training code calls both functions on
any host.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from spectral.kernels.library import is_slow


class CpuStream(torch.cpu.Stream):
    """A stream whose work is always complete."""

    def wait_event(self, event: object) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: object = None) -> object:  # type: ignore[override]
        return event or CpuEvent()


class CpuEvent:
    """An event that is always complete."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class CudaDeviceIsCpu(TorchFunctionMode):
    """Replaces the keyword `device="cuda"` of any torch function by the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class WideProducts(TorchFunctionMode):
    """Takes products of types that this CPU has no instructions for through float32, as a GPU
    accumulates them; else bfloat16 takes seven times as long as float32 (AMD EPYC with AVX2)."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.matmul, Tensor.matmul) and is_slow(args[0]) and not kwargs:
            return func(*(x.float() for x in args)).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


def in_wide_products(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with its products as `WideProducts` take them."""

    @functools.wraps(function)
    def wrapped(*arguments: Any) -> Any:
        with WideProducts():
            return function(*arguments)

    wrapped.wide = True  # type: ignore[attr-defined]
    return wrapped


def prepare_megatron() -> None:
    """Make megatron-core usable on this host. Call before building a model."""
    from megatron.core.transformer.moe import moe_utils

    # Without Transformer Engine the router's product looks up a kernel that does not exist.
    vars(moe_utils).setdefault("te_general_gemm", None)
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    # Dropout is 0 everywhere, so no generator is ever drawn from: the inference tracker's fork() is
    # a no-op, where the other one's asks for states that only Megatron's own start-up seeds.
    initialize_rng_tracker(inference_rng_tracker=True)
    if torch.cuda.is_available():
        return
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.Stream = CpuStream  # type: ignore[assignment, misc]
    torch.cuda.Event = CpuEvent  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda *_: CpuStream()  # type: ignore[assignment]
    torch.cuda.default_stream = lambda *_: CpuStream()  # type: ignore[assignment]
    torch.cuda.stream = torch.cpu.stream  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None
    from megatron.core.tensor_parallel import layers, random

    linear = layers.LinearWithGradAccumulationAndAsyncCommunication
    if not hasattr(linear.forward, "wide"):
        linear.forward = staticmethod(in_wide_products(linear.forward))
        linear.backward = staticmethod(in_wide_products(linear.backward))
    # Recomputed layers restore the state of the CUDA generator.
    random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)
    random._set_cuda_rng_state = lambda *_, **__: None


@contextlib.contextmanager
def schedule_devices() -> Iterator[None]:
    """Context of Megatron's pipeline schedules: a literal "cuda" means this host's device in it.

    Enter it around a schedule call only: it intercepts every torch function.
    """
    if torch.cuda.is_available():
        yield
        return
    with CudaDeviceIsCpu():
        yield
