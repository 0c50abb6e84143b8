"""Launches of the kernels of Liger's loss, written down."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import Tensor

from training.rehearsal.program import put
from training.rehearsal.trace import Launch, Trace


class Kernel:
    """Stands for a Triton kernel, which is called as `kernel[grid](NAME=value, ...)`.

    `made` are the names of tensors that it writes without reading them, `changed` of those that it
    reads and writes.
    """

    def __init__(
        self, trace: Trace, name: str, made: tuple[str, ...] = (), changed: tuple[str, ...] = ()
    ) -> None:
        self.trace, self.name, self.made, self.changed = trace, name, made, changed

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.launch

    def launch(self, **arguments: Any) -> None:
        """Write a launch down; the tensors of `arguments` are moved once."""
        tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
        read = [x for name, x in tensors.items() if name not in self.made]
        written = [tensors[name] for name in (*self.made, *self.changed)]
        self.trace.launch(replace(Launch.moving(self.name, read, written), triton=True))


def installed() -> bool:
    """Return whether liger-kernel is installed."""
    return importlib.util.find_spec("liger_kernel") is not None


def kernels() -> ModuleType:
    """Return the module of its loss, whose import takes seconds."""
    return importlib.import_module("liger_kernel.ops.vocab_parallel_cross_entropy")


def install(trace: Trace) -> None:
    """Write launches of its loss down, for the life of this process, if it is installed."""
    if not installed():
        return
    made = ("EXP_ptr", "pred_ptr", "sum_exp_ptr")
    for part, names in (("forward", {"made": made}), ("backward", {"changed": ("EXP_ptr",)})):
        name = f"liger_vocab_parallel_ce_{part}_kernel"
        put(kernels(), name, Kernel(trace, name, **names))
