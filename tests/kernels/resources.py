"""Resources that each kernel takes of a streaming multiprocessor, found without a GPU.

    python -m tests.kernels.resources

compiles every tile of the table for compute capability 9.0 (H100, H200), as a launch for large
contiguous matrices would, and prints registers per thread, shared memory per program and bytes
spilled to local memory.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from spectral.kernels import grouped, small, symmetric, update
from spectral.kernels.dispatch import (
    OPERATIONS,
    SMALL,
    VECTORS,
    Operation,
    Tile,
    candidates,
    entries,
)
from spectral.kernels.launches import Launch, observe

CAPABILITY = 90
SHARED_LIMIT = 232448
"""Bytes of shared memory that one program can use on an H100 or H200."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROWS, COLS = 2064, 2048
"""Sizes of matrices: multiples of 16, as most are, whose number of tiles is none."""


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


def of(operation: Operation, dtype: str, tile: Tile) -> Resources:
    """Compile the kernel of an operation of the table for a tile."""
    kind = DTYPES[dtype]
    x, square = _matrices(ROWS, COLS, dtype=kind), _matrices(ROWS, ROWS, dtype=kind)
    calls: dict[Operation, Callable[[], object]] = {
        "gram": partial(symmetric.gram, x, tile),
        "commuting": partial(symmetric.commuting, square, square, 0.0, tile),
        "polynomial": partial(symmetric.polynomial, square, 1.0, 1.0, 1.0, tile),
        "grouped": partial(grouped.grams, [x] * grouped.STACKS, tile),
    }
    return compiled(calls[operation])


def of_update(dtype: str) -> Resources:
    """Compile the fused update of scaled weights by a `dtype` direction."""
    direction = _matrices(ROWS, COLS, dtype=DTYPES[dtype])
    scale = torch.empty(2, device="meta")
    return compiled(partial(update.update_, _matrices(ROWS, COLS), direction, *_rates(), scale))


def of_eigenvector(size: int) -> Resources:
    """Compile the top eigenvector of matrices with up to `size` rows."""
    t = _matrices(size - 1, size - 1, dtype=torch.float64)
    return compiled(partial(small.top_eigenvector, t, (7, 7, 7), 1e-300))


def of_root() -> Resources:
    """Compile the root of a model on two grids of 512 intervals."""
    block = _matrices(2, 40, batch=3, dtype=torch.float64)
    return compiled(partial(small.root, block, block[0], block[0, :, 0], 2, 512))


def of_orthonormal(size: int) -> Resources:
    """Compile the orthonormalisation of up to `size` float32 vectors."""
    return compiled(partial(small.orthonormal, _matrices(size - 1, 1032), 1e-10))


def _matrices(
    rows: int, cols: int, *, batch: int = 2, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.empty(batch, rows, cols, dtype=dtype, device="meta")


def _rates() -> tuple[Tensor, Tensor, Tensor]:
    """Factor, step and predicate of two matrices."""
    rate = torch.empty(2, device="meta")
    return rate, rate, torch.empty((), dtype=torch.bool, device="meta")


def compiled(call: Callable[[], object]) -> Resources:
    """Compile the one kernel that `call` launches, on tensors of the device "meta"."""
    real, found = JITFunction.run, list[Launch]()
    observe(found.append)
    try:
        call()
    finally:
        JITFunction.run = real
    (launch,) = found
    result = launch.compile_for(CAPABILITY)
    registers, spilled = _usage(result.asm["cubin"])
    return Resources(
        registers,
        result.metadata.shared,
        spilled,
        bool(re.search(r"\bw?g?mma\.", result.asm["ptx"])),
    )


def _usage(binary: bytes) -> tuple[int, int]:
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
    return int(registers[1]), int(stack[1])


def main() -> None:
    """Print a line for each kernel, dtype and tile of tuning and of the table."""
    used = {(op, dtype, t) for op in OPERATIONS for dtype in DTYPES for t in candidates(dtype)}
    used |= {
        (e.operation, e.dtype, e.tile)
        for rows in entries().values() for e in rows if e.tile is not None
    }  # fmt: skip
    print(f"{'kernel':<12}{'dtype':<10}{'tile':<20}{'registers':>10}{'shared':>10}{'spilled':>9}")
    for operation, dtype, tile in sorted(used, key=str):
        _print(operation, dtype, str(tile), of(operation, dtype, tile))
    for dtype in DTYPES:
        _print("update", dtype, "", of_update(dtype))
    for size in (16, 32, SMALL):
        _print("eigenvector", "float64", f"{size}x{size}", of_eigenvector(size))
    for size in (16, VECTORS):
        _print("orthonormal", "float32", f"{size} vectors", of_orthonormal(size))
    _print("root", "float64", "", of_root())


def _print(name: str, dtype: str, tile: str, r: Resources) -> None:
    print(f"{name:<12}{dtype:<10}{tile:<20}{r.registers:>10}{r.shared:>10}{r.spilled:>9}")


if __name__ == "__main__":
    main()
