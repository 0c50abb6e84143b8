"""Recording of launches of Spectrain's Triton kernels and of liger-kernel's loss kernels. If
requested, each specialisation of Spectrain's kernels is compiled once.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import Tensor

from parallel.plan.devices import SYMMETRIC, Work
from training.rehearsal.operations import OPERANDS
from training.rehearsal.program import place, put
from training.rehearsal.trace import Launch, Trace, size_of


class HostArgumentError(RuntimeError):
    """A host tensor passed to a device kernel."""


def install_kernels(trace: Trace, *, compiled: bool = False) -> None:
    """Record launches of Triton kernels until this process ends; if `compiled` is true, compile
    each specialisation for the simulated device."""
    if importlib.util.find_spec("triton") is None:
        return
    from spectral.kernels import launches

    major, minor = trace.device.capability
    compiled_kinds: set[object] = set()

    def on_launch(launch: launches.Launch) -> None:
        for tensor in launch.read:
            if not tensor.is_cuda:
                raise HostArgumentError(
                    f"{launch.name} at {place()} needs device tensors, got one on {tensor.device}"
                )
        if compiled and launch.specialisation not in compiled_kinds:
            compiled_kinds.add(launch.specialisation)
            launch.compile_for(10 * major + minor)
        written = launch.written
        read = [x for x in launch.read if not any(x is w for w in written)]
        kind = OPERANDS.get((read or written)[0].dtype, "fp32")
        thrice = launch.arguments.get("PRECISION") == "tf32x3"  # products on tensor cores
        work = Work(
            sum(size_of(x) for x in (*read, *written, *launch.changed)),
            launch.flops * (3 if thrice else 1),
            "tf32" if kind == "fp32" and thrice else kind,
            share=SYMMETRIC,
        )
        trace.launch(Launch(launch.name, read, written, work, triton=True))

    launches.observe(on_launch)


class Kernel:
    """Replacement of a Triton kernel, called as `kernel[grid](NAME=value, ...)`.

    `made` contains the names of tensors that the kernel only writes, `changed` the names of tensors
    that the kernel reads and writes.
    """

    def __init__(
        self, trace: Trace, name: str, made: tuple[str, ...] = (), changed: tuple[str, ...] = ()
    ) -> None:
        self.trace, self.name, self.made, self.changed = trace, name, made, changed

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.launch

    def launch(self, **arguments: Any) -> None:
        """Record a launch that reads or writes each tensor in `arguments` once."""
        tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
        read = [x for name, x in tensors.items() if name not in self.made]
        written = [tensors[name] for name in (*self.made, *self.changed)]
        self.trace.launch(replace(Launch.moving(self.name, read, written), triton=True))


def liger_installed() -> bool:
    """Return whether liger-kernel is installed."""
    return importlib.util.find_spec("liger_kernel") is not None


def liger_kernels() -> ModuleType:
    """Return the module of liger-kernel's loss, whose import takes seconds."""
    return importlib.import_module("liger_kernel.ops.vocab_parallel_cross_entropy")


def install_liger(trace: Trace) -> None:
    """Record launches of liger-kernel's loss, if it is installed, until this process ends."""
    if not liger_installed():
        return
    made = ("EXP_ptr", "pred_ptr", "sum_exp_ptr")
    for part, names in (("forward", {"made": made}), ("backward", {"changed": ("EXP_ptr",)})):
        name = f"liger_vocab_parallel_ce_{part}_kernel"
        put(liger_kernels(), name, Kernel(trace, name, **names))
