"""IEEE float32 matmuls, regardless of process-wide settings and environment variables.

Float32 has 24 bits of precision, TF32 has 11 and bfloat16 has 8. `torch.autocast` rounds matmul
operands to 16 bits. With fewer than 24 bits, msign's singular values and the Spectral Sphere solver
silently miss their tolerances. `torch.set_float32_matmul_precision("high")` and
TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 enable TF32. These settings are meant for the forward pass, so
optimizers compute inside `ieee_products()`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch

MATMUL: tuple[Any, ...] = tuple(
    backend
    for backend in (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    if hasattr(backend, "fp32_precision")
)
"""PyTorch's float32 matmul precision settings on GPUs and CPUs; torch 2.6 only supports the older
function `set_float32_matmul_precision`."""
REDUCTIONS = [
    name
    for name in (
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    )
    if hasattr(torch.backends.cuda.matmul, name)  # the last is new in torch 2.7
]
"""Settings that allow 16-bit matmuls on GPUs to accumulate in less than float32."""


AUTOCAST = ("cpu", "cuda")
"""Device types for which autocast is disabled."""

_lock = Lock()
_inside = 0  # active blocks in all threads, because the settings are process-wide
_restore: Callable[[], None] | None = None


def without_autocast(device: torch.device) -> torch.autocast:
    """Return a context manager that disables `torch.autocast` on a device."""
    return torch.autocast(device.type if device.type in AUTOCAST else "cpu", enabled=False)


@contextmanager
def ieee_products() -> Iterator[None]:
    """Run a block with IEEE float32 matmuls and with float32 accumulation in 16-bit matmuls.

    Previous settings are restored afterwards, whichever torch function was used to set them. If
    several threads run such blocks concurrently, the last thread to finish restores the settings.
    """
    global _inside, _restore
    with _lock:
        if not _inside:
            _restore = _set_ieee()
        _inside += 1
    try:
        with ExitStack() as stack:
            for device in filter(torch.is_autocast_enabled, AUTOCAST):
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _restore is not None:
                _restore()


def _set_ieee() -> Callable[[], None]:
    """Enable IEEE matmuls, and return a function that restores the previous settings."""
    try:
        legacy = str(torch.get_float32_matmul_precision())
    except RuntimeError:  # the newer API was used: infer the precision
        legacy = "high" if is_ieee() else "highest"
    precisions = [backend.fp32_precision for backend in MATMUL]
    reductions = {name: getattr(torch.backends.cuda.matmul, name) for name in REDUCTIONS}
    # This older function changes all settings; cuBLAS rejects settings that conflict with it.
    torch.set_float32_matmul_precision("highest")
    for name in REDUCTIONS:
        setattr(torch.backends.cuda.matmul, name, False)

    def restore() -> None:
        torch.set_float32_matmul_precision(legacy)
        for backend, precision in zip(MATMUL, precisions, strict=True):
            backend.fp32_precision = precision
        for name, value in reductions.items():
            setattr(torch.backends.cuda.matmul, name, value)

    return restore


def is_ieee() -> bool:
    """Return whether float32 matmuls are currently IEEE, on both GPUs and CPUs."""
    precisions = [backend.fp32_precision for backend in MATMUL]
    precisions = precisions or [torch.get_float32_matmul_precision()]
    return {*precisions} <= {"none", "ieee", "highest"}
