"""Launches of Triton kernels observed instead of made, on machines without a GPU.

A launch says what it would read and write, how many FLOPs it would do, and what its kernel would be
compiled for; `compile_for` compiles that.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

WRITTEN: Final[Mapping[str, tuple[str, ...]]] = {
    "symmetric_kernel": ("out",),
    "grouped_kernel": ("out",),
    "momentum_kernel": ("grad", "mean"),
    "update_kernel": ("weight", "squares"),
    "eigenvector_kernel": ("out",),
    "root_kernel": ("offset", "slope"),
    "orthonormal_kernel": ("out",),
    "gated_kernel": ("out", "of_scale"),
    "heads_kernel": ("out", "q_sums", "k_sums"),
}
"""Per kernel the arguments that it writes; of one that is not here, all are taken for written."""
CHANGED: Final[Mapping[str, tuple[str, ...]]] = {
    "momentum_kernel": ("grad", "mean"),
    "update_kernel": ("weight",),
}
"""Per kernel the arguments that it reads as well as writes."""

FLOPS: Final[Mapping[str, Callable[[Mapping[str, Any], int], float]]] = {
    "symmetric_kernel": lambda a, programs: 2 * programs * a["BLOCK"] ** 2 * a["depth"],
    "grouped_kernel": lambda a, programs: (
        2
        * a["BLOCK"] ** 2
        * a["tiles"]
        * sum(a[f"a{i}"].shape[0] * a[f"depth{i}"] for i in range(4))
    ),
}
"""Per kernel its FLOPs, of its arguments and the number of programs; of others 0."""

TYPES: Final = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
OPTIONS: Final = ("num_warps", "num_stages", "num_ctas", "maxnreg")
ALIGNMENT: Final = 16


@dataclass(frozen=True)
class Launch:
    """One launch: kernel, its arguments by name, number of programs, and Triton's options."""

    kernel: Any
    arguments: Mapping[str, Any]
    programs: int
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.__name__)

    @property
    def written(self) -> list[Tensor]:
        """The tensors that it writes."""
        names = WRITTEN.get(self.name, tuple(self.arguments))
        return [x for name in names if isinstance(x := self.arguments[name], Tensor)]

    @property
    def changed(self) -> list[Tensor]:
        """The tensors that it reads and writes."""
        return [self.arguments[name] for name in CHANGED.get(self.name, ())]

    @property
    def read(self) -> list[Tensor]:
        """The tensors that it is given and does not only write."""
        return [x for x in self.arguments.values() if isinstance(x, Tensor)]

    @property
    def flops(self) -> float:
        """FLOPs of its products."""
        count = FLOPS.get(self.name)
        return 0.0 if count is None else float(count(self.arguments, self.programs))

    @cached_property
    def specialisation(self) -> tuple[Any, ...]:
        """What Triton compiles it for, hashable: two launches alike share a compiled kernel."""
        types, constants, aligned = self._signature()
        return (
            self.name,
            tuple(types.items()),
            tuple(constants.items()),
            aligned,
            tuple(sorted(self.options.items())),
        )

    def compile_for(self, capability: int) -> Any:
        """What Triton makes of it for GPUs of compute capability `capability`, e.g. 90.

        Raises what Triton raises for what it cannot compile.
        """
        types, constants, aligned = self._signature()
        source = ASTSource(
            fn=self.kernel,
            signature=types,
            constexprs=constants,
            attrs={(i,): [["tt.divisibility", ALIGNMENT]] for i in aligned},
        )
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(source, target=target, options=dict(self.options))

    def _signature(self) -> tuple[dict[str, str], dict[str, Any], tuple[int, ...]]:
        """Types of the arguments, values of those that are constants, and places of those that are
        multiples of 16, as Triton specialises a launch."""
        types: dict[str, str] = {}
        constants: dict[str, Any] = {}
        aligned: list[int] = []
        for i, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            kind = "constexpr" if parameter.is_constexpr else _type(value)
            types[parameter.name] = kind
            if kind == "constexpr":
                constants[parameter.name] = value
            elif _is_aligned(value):
                aligned.append(i)
        return types, constants, tuple(aligned)


def _type(value: Any) -> str:
    """Triton's name of an argument's type; constexpr for what it makes a constant of."""
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    if value is None or (type(value) is int and value == 1):
        return "constexpr"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"a kernel takes tensors, numbers and None, got {type(value).__name__}")


def _is_aligned(value: Any) -> bool:
    """Whether an argument is a multiple of 16: a number, or the address of memory that begins
    aligned, as the device's does."""
    if isinstance(value, Tensor):
        return value.storage_offset() * value.element_size() % ALIGNMENT == 0
    return type(value) is int and value % ALIGNMENT == 0


def observe(on_launch: Callable[[Launch], None]) -> None:
    """Give every launch of a Triton kernel to `on_launch` instead of a GPU, for the life of this
    process."""

    def run(kernel: Any, *values: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        options: dict[str, Any] = {key: named.pop(key) for key in OPTIONS if key in named}
        arguments = {p.name: p.default for p in kernel.params if p.has_default}
        arguments |= dict(zip(kernel.arg_names, values, strict=False)) | named
        size = grid(arguments) if callable(grid) else grid
        programs = 1
        for extent in size:
            programs *= extent
        on_launch(Launch(kernel, {n: arguments[n] for n in kernel.arg_names}, programs, options))

    JITFunction.run = run
