"""Resources that each kernel takes of a streaming multiprocessor, found without a GPU.

    python -m spectral.kernels.resources

compiles every tile of the table for compute capability 9.0 (H100, H200) and prints registers per
thread, shared memory per program and bytes spilled to local memory.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import finish, grouped, one_pass, small, update
from .dispatch import OPERATIONS, SMALL, Operation, Tile, candidates, entries
from .symmetric import symmetric_kernel

SHARED_LIMIT = 232448
"""Bytes of shared memory that one program can use on an H100 or H200."""
NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Resources:
    """Resources of one compiled kernel.

    Attributes:
        registers: per thread, at most 255.
        shared: bytes of shared memory per program.
        spilled: bytes of local memory per thread, 0 unless registers ran out.
        tensor_cores: whether it multiplies on tensor cores.
    """

    registers: int
    shared: int
    spilled: int
    tensor_cores: bool


def of_symmetric(dtype: str, tile: Tile, *, add: bool, capability: int = 90) -> Resources:
    """Compile the symmetric product of contiguous matrices; `add` as in the polynomial.

    Sizes are multiples of 16.
    """
    pointers = dict.fromkeys(("a", "b", "s", "out"), f"*{NAMES[dtype]}")
    sizes = ("n", "depth", "a_batch", "a_row", "b_batch", "b_row", "s_batch", "s_row", "out_batch")
    scalars = dict.fromkeys(("alpha", "beta", "gamma"), "fp32")
    constants = {
        "a_col": 1, "b_col": 1, "s_col": 1, "ADD": add, **tile.constants(widen=False),
    }  # fmt: skip
    types = {**pointers, **dict.fromkeys(sizes, "i32"), "tiles": "i32", **scalars}
    return compiled(symmetric_kernel, types, constants, (*pointers, *sizes), tile, capability)


def of_update(dtype: str, capability: int = 90) -> Resources:
    """Compile the fused update by a contiguous direction of `dtype`, with a bfloat16 copy."""
    pointers = {name: "*fp32" for name in ("weight", "squares", "scale", "factor", "step")}
    pointers |= {"direction": f"*{NAMES[dtype]}", "copy": "*bf16", "active": "*u8"}
    sizes = ("numel", "cols", "d_batch", "d_row", "c_batch", "c_row")
    types = {**pointers, **dict.fromkeys((*sizes, "parts"), "i32")}
    constants = {"d_col": 1, "c_col": 1, "SCALED": True, "COPY": True, "BLOCK": update.BLOCK}
    tile = Tile(0, 0, update.WARPS, 1)
    return compiled(update.update_kernel, types, constants, ("weight", *sizes), tile, capability)


def of_eigenvector(size: int, capability: int = 90) -> Resources:
    """Compile the top eigenvector of contiguous matrices with up to `size` rows."""
    types = {"t": "*fp64", "out": "*fp64", "size": "i32"}
    constants = {"TINY": 1e-300, "ROUNDS": 3, "SQUARINGS": 7, "SIZE": size}
    tile = Tile(0, 0, small.WARPS, 1)
    return compiled(small.eigenvector_kernel, types, constants, ("t", "out"), tile, capability)


def of_root(capability: int = 90) -> Resources:
    """Compile the root of a model on two grids of 512 intervals."""
    pointers = dict.fromkeys(("block", "weight", "half", "offset", "slope"), "*fp64")
    types = {**pointers, "batch": "i32", "nodes": "i32"}
    constants = {"ROUNDS": 2, "POINTS": 512, "SIZE": 1024}
    tile = Tile(0, 0, small.WARPS, 1)
    return compiled(small.root_kernel, types, constants, tuple(pointers), tile, capability)


def of_orthonormal(size: int, capability: int = 90) -> Resources:
    """Compile the orthonormalisation of up to `size` contiguous float32 vectors."""
    types = {"x": "*fp32", "out": "*fp32", "count": "i32", "n": "i32"}
    types |= {"x_batch": "i32", "x_row": "i32"}
    constants = {"x_col": 1, "DEPENDENT": 1e-10, "SIZE": size, "COLUMNS": small.COLUMNS}
    tile = Tile(0, 0, small.WARPS, 1)
    return compiled(small.orthonormal_kernel, types, constants, ("x", "out"), tile, capability)


def of_grouped(dtype: str, tile: Tile, capability: int = 90) -> Resources:
    """Compile X X^T of four stacks of contiguous matrices."""
    stacks = range(grouped.STACKS)
    pointers = dict.fromkeys((*(f"a{i}" for i in stacks), "out"), f"*{NAMES[dtype]}")
    sizes = ("n", *(f"{name}{i}" for i in stacks for name in ("depth", "batch", "row")))
    ends = tuple(f"end{i}" for i in stacks[:-1])
    types = {**pointers, **dict.fromkeys((*sizes, *ends, "tiles"), "i32")}
    constants = dict.fromkeys((f"col{i}" for i in stacks), 1) | tile.constants(widen=False)
    aligned = (*pointers, *sizes)
    return compiled(grouped.grouped_kernel, types, constants, aligned, tile, capability)


def of_finish(dtype: str, tile: Tile, capability: int = 90) -> Resources:
    """Compile the last product with the update in its epilogue, and a bfloat16 copy.

    Matrices are contiguous.
    """
    pointers = {name: "*fp32" for name in ("weight", "squares", "factor", "step")}
    pointers |= {"copy": "*bf16", "active": "*u8"} | dict.fromkeys("py", f"*{NAMES[dtype]}")
    sizes = ("m", "n", *(f"{name}_{of}" for name in "wcpy" for of in ("batch", "row")))
    types = {**pointers, **dict.fromkeys(sizes, "i32"), "a": "fp32"}
    strides = dict.fromkeys((f"{name}_col" for name in "wcpy"), 1)
    constants = {**strides, "COPY": True, **tile.constants(widen=False)}
    aligned = ("weight", "copy", "p", "y", *sizes)
    return compiled(finish.finish_kernel, types, constants, aligned, tile, capability)


def of_power(dtype: str, tile: Tile, capability: int = 90) -> Resources:
    """Compile both products of a power iteration with contiguous matrices."""
    pointers = {"w": f"*{NAMES[dtype]}"} | dict.fromkeys("xyz", "*fp32")
    sizes = ("rows", "cols", "w_batch", "w_row")
    types = {**pointers, **dict.fromkeys((*sizes, "vectors", "parts"), "i32")}
    constants = {"w_col": 1, "BLOCK": tile.block, "DEPTH": tile.depth}
    aligned = (*pointers, *sizes)
    return compiled(one_pass.power_kernel, types, constants, aligned, tile, capability)


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    aligned: tuple[str, ...],
    tile: Tile,
    capability: int,
) -> Resources:
    """Compile `kernel`; `aligned` arguments are multiples of 16, as most are in practice."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs=dict(constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=tile.options)
    return Resources(
        **_usage(result.asm["cubin"]),
        shared=result.metadata.shared,
        tensor_cores=bool(re.search(r"\bw?g?mma\.", result.asm["ptx"])),
    )


def _usage(binary: bytes) -> dict[str, int]:
    """Read registers and spilled bytes from the binary by the tool that ships with triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        done = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    registers = re.search(r"REG:(\d+)", done.stdout)
    stack = re.search(r"STACK:(\d+)", done.stdout)
    if registers is None or stack is None:
        raise RuntimeError(f"cuobjdump must name REG and STACK, got {done.stdout!r}")
    return {"registers": int(registers[1]), "spilled": int(stack[1])}


def main() -> None:
    """Print a line for each kernel, dtype and tile of tuning and of the table."""
    used = {(op, dtype, t) for op in OPERATIONS for dtype in NAMES for t in candidates(op, dtype)}
    used |= {
        (e.operation, e.dtype, e.tile)
        for rows in entries().values() for e in rows if e.tile is not None
    }  # fmt: skip
    print(f"{'kernel':<12}{'dtype':<10}{'tile':<20}{'registers':>10}{'shared':>10}{'spilled':>9}")
    for operation, dtype, tile in sorted(used, key=str):
        _print(operation, dtype, str(tile), of(operation, dtype, tile))
    for dtype in NAMES:
        _print("update", dtype, "", of_update(dtype))
    for size in (16, 32, SMALL):
        _print("eigenvector", "float64", f"{size}x{size}", of_eigenvector(size))
        _print("orthonormal", "float32", f"{size} vectors", of_orthonormal(size))
    _print("root", "float64", "", of_root())


def of(operation: Operation, dtype: str, tile: Tile) -> Resources:
    """Compile the kernel of an operation of the table."""
    others = {"grouped": of_grouped, "finish": of_finish, "power": of_power}
    if operation in others:
        return others[operation](dtype, tile)
    return of_symmetric(dtype, tile, add=operation == "polynomial")


def _print(name: str, dtype: str, tile: str, r: Resources) -> None:
    print(f"{name:<12}{dtype:<10}{tile:<20}{r.registers:>10}{r.shared:>10}{r.spilled:>9}")


if __name__ == "__main__":
    main()
