"""Records Triton kernel launches on machines that cannot run the kernels.

A record holds the tensors that the launch would read and write, the launch's FLOPs, and the kernel
specialisation, which `compile_for` can compile.
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
"""Arguments written by each kernel. Kernels not listed are assumed to write all their arguments."""
CHANGED: Final[Mapping[str, tuple[str, ...]]] = {
    "momentum_kernel": ("grad", "mean"),
    "update_kernel": ("weight",),
}
"""Arguments of each kernel that are both read and written."""

FLOPS: Final[Mapping[str, Callable[[Mapping[str, Any], int], float]]] = {
    "symmetric_kernel": lambda a, programs: 2 * programs * a["BLOCK"] ** 2 * a["depth"],
    "grouped_kernel": lambda a, programs: (
        2
        * a["BLOCK"] ** 2
        * a["tiles"]
        * sum(a[f"a{i}"].shape[0] * a[f"depth{i}"] for i in range(4))
    ),
}
"""FLOPs of each kernel, given its arguments and number of programs; 0 for kernels not listed."""

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
    """A kernel launch: kernel, arguments by name, number of programs, and Triton options."""

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
        """The tensors written by the kernel."""
        names = WRITTEN.get(self.name, tuple(self.arguments))
        return [x for name in names if isinstance(x := self.arguments[name], Tensor)]

    @property
    def changed(self) -> list[Tensor]:
        """The tensors that are both read and written by the kernel."""
        return [self.arguments[name] for name in CHANGED.get(self.name, ())]

    @property
    def read(self) -> list[Tensor]:
        """The tensors read by the kernel."""
        return [x for x in self.arguments.values() if isinstance(x, Tensor)]

    @property
    def flops(self) -> float:
        """FLOPs of the kernel's matmuls."""
        count = FLOPS.get(self.name)
        return 0.0 if count is None else float(count(self.arguments, self.programs))

    @cached_property
    def specialisation(self) -> tuple[Any, ...]:
        """Hashable key of the specialisation: launches with equal keys share a compiled kernel."""
        types, constants, aligned = self._signature()
        return (
            self.name,
            tuple(types.items()),
            tuple(constants.items()),
            aligned,
            tuple(sorted(self.options.items())),
        )

    def compile_for(self, capability: int) -> Any:
        """Compile the kernel for GPUs with compute capability `capability`, e.g. 90.

        Raises Triton's error if the kernel does not compile.
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
        """Return argument types, constant values, and indices of arguments divisible by 16."""
        types: dict[str, str] = {}
        constants: dict[str, Any] = {}
        aligned: list[int] = []
        for i, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            kind = "constexpr" if parameter.is_constexpr else _type(value)
            types[parameter.name] = kind
            if kind == "constexpr":
                constants[parameter.name] = value
            else:
                # A number, or a tensor's byte offset in its storage.
                number = value
                if isinstance(value, Tensor):
                    number = value.storage_offset() * value.element_size()
                if type(number) is int and number % ALIGNMENT == 0:
                    aligned.append(i)
        return types, constants, tuple(aligned)


def _type(value: Any) -> str:
    """Return Triton's type name for an argument: "constexpr" for None and the integer 1."""
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
    raise TypeError(
        f"kernel arguments must be tensors, numbers or None, got {type(value).__name__}"
    )


def observe(on_launch: Callable[[Launch], None]) -> None:
    """Pass every Triton launch in this process to `on_launch` instead of running it on a GPU."""

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
