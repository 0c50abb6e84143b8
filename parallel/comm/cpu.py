"""All patches that make megatron-core run on a host without CUDA.

Megatron-core unconditionally calls `torch.cuda` for the current device, streams and events. Its
schedules create one tensor on the hard-coded device "cuda", and its RNG state tracker needs a CUDA
generator. In PyTorch's CPU backend, the counterparts of these functions are no-ops. On hosts with
CUDA, only code that fails without Transformer Engine is patched. Training calls `prepare_megatron`
and `schedule_devices` on every host.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store
from torch.overrides import TorchFunctionMode

from spectral.kernels.library import is_slow


class CpuStream(torch.cpu.Stream):
    """A stream on which all work is always complete."""

    def synchronize(self) -> None: ...
    def record_event(self, event: object = None) -> object:  # type: ignore[override]
        return event or CpuEvent()


class CpuEvent(torch.cpu.Event):
    """An event that is always complete. Accepts and ignores all CUDA event options."""

    def __init__(self, *_: object, **__: object) -> None: ...


class Calls(TorchFunctionMode):
    """Context manager that routes calls of torch functions through `call(function, args,
    kwargs)`."""

    def __init__(self, call: Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]):
        super().__init__()
        self.call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` through `call`."""
        return self.call(func, args, dict(kwargs or {}))


def on_cpu(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call `function`, replacing a keyword argument `device="cuda"` with the CPU."""
    if str(kwargs.get("device", "")).startswith("cuda"):
        kwargs["device"] = "cpu"
    return function(*args, **kwargs)


def in_float32(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call `function`, but run matmuls in float32 if this CPU has no instructions for their dtype.

    GPUs also accumulate such matmuls in float32. On an AMD EPYC with AVX2, bfloat16 matmuls would
    take 20 to 40 times as long.
    """
    if function in (torch.matmul, Tensor.matmul) and is_slow(args[0]) and not kwargs:
        return function(*(x.float() for x in args)).to(args[0].dtype)
    return function(*args, **kwargs)


@functools.cache
def widen_linears() -> None:
    """Route the matmuls of Megatron's linear layers through `in_float32`, forward and backward."""
    from megatron.core.tensor_parallel import layers

    def widened(function: Callable[..., Any]) -> Any:
        def call(*arguments: Any) -> Any:
            with Calls(in_float32):
                return function(*arguments)

        return staticmethod(call)

    linear = layers.LinearWithGradAccumulationAndAsyncCommunication
    linear.forward, linear.backward = widened(linear.forward), widened(linear.backward)


@functools.cache
def share_gloo_device() -> None:
    """Make all gloo groups of this process share one gloo device, or one per interface listed in
    GLOO_SOCKET_IFNAME.

    Each gloo device has a thread that wakes up 100 times per second, and each rank has about 20
    groups. An idle rank uses 2.7% of a core with one device per group, but 0.3% with a shared
    device.
    """
    plain: Any = distributed_c10d.ProcessGroupGloo

    @functools.cache
    def devices() -> list[Any]:
        names = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
        named = [plain.create_device(interface=name) for name in names]
        return named or [plain.create_default_device()]

    class SharedDevice(plain):
        def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
            options = plain._Options()
            options._devices, options._timeout = devices(), timeout
            options._threads = 2 * len(devices())  # torch's default
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedDevice  # type: ignore[misc]


def prepare_megatron() -> None:
    """Patch megatron-core to run on this host. Call this before building a model."""
    from megatron.core.transformer.moe import moe_utils

    # Without Transformer Engine, the router GEMM would call a missing kernel.
    vars(moe_utils).setdefault("te_general_gemm", None)
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    # Dropout is 0, so no RNG is used. The inference tracker's fork() is a no-op; the default
    # tracker's fork() requires states that are only seeded by Megatron's own initialization code.
    initialize_rng_tracker(inference_rng_tracker=True)
    if torch.cuda.is_available():
        return
    share_gloo_device()
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.Stream = CpuStream  # type: ignore[assignment, misc]
    torch.cuda.Event = CpuEvent  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda *_: CpuStream()  # type: ignore[assignment]
    torch.cuda.default_stream = lambda *_: CpuStream()  # type: ignore[assignment]
    torch.cuda.stream = torch.cpu.stream  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None
    widen_linears()
    from megatron.core.tensor_parallel import random

    # Activation recomputation saves and restores the CUDA RNG state.
    random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)
    random._set_cuda_rng_state = lambda *_, **__: None


@contextlib.contextmanager
def schedule_devices() -> Iterator[None]:
    """Context manager that uses this host's device where Megatron's schedules hard-code "cuda".

    It intercepts every torch function, so wrap only the schedule call in it.
    """
    if torch.cuda.is_available():
        yield
        return
    with Calls(on_cpu):
        yield
