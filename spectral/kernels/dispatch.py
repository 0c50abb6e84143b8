"""Selects the library or a kernel, based on operation, shape, dtype and device.

Selections come from table.json, which ships with the code. `scripts/bench/tune.py` runs the
benchmarks and writes a new table. Nothing is benchmarked during a step, so a given shape on a given
device always uses the same kernel.
"""

import importlib.metadata
import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..device_values import constant_result

Operation = Literal["gram", "commuting", "polynomial", "grouped"]
OPERATIONS: tuple[Operation, ...] = ("gram", "commuting", "polynomial", "grouped")
Precision = Literal["ieee", "tf32x3"]

SMALL = 64
"""Triton kernels are used for up to this many rows in a projected matrix or this many poles."""
VECTORS = 32
"""Maximum number of vectors per matrix that one Triton program orthonormalises; more vectors would
not fit in the registers."""
DOUBLES = (3, 7)
"""Oldest Triton version whose float64 matmuls have been tested."""
TABLE = Path(__file__).with_name("table.json")
# In the distance to a table entry, a factor of two in rows counts this many times as much as a
# factor of two in columns or batch size.
ROWS_WEIGHT = 4.0


@dataclass(frozen=True)
class Tile:
    """Tiling of a matmul: tiles of `block` x `block`, computed from `depth` columns at a time.

    Attributes:
        block, depth: tile sizes.
        warps, stages: Triton's `num_warps` and `num_stages`.
        precision: precision of float32 products: "ieee", or "tf32x3" (three tensor-core products,
            about 22 bits). With both settings, products of 16-bit numbers are exact.
    """

    block: int
    depth: int
    warps: int
    stages: int
    precision: Precision = "ieee"

    def __str__(self) -> str:
        if self == QUACK:
            return "quack"
        size = f"{self.block}x{self.block}x{self.depth}"
        return size if self.precision == "ieee" else f"{size} {self.precision}"

    def options(self, *, widen: bool) -> dict[str, object]:
        """Return the compile-time constants and launch options of a matmul kernel.

        With `widen`, the kernel upcasts operands to float32 before multiplying them, as required by
        Triton's interpreter.
        """
        return {
            "BLOCK": self.block, "DEPTH": self.depth, "PRECISION": self.precision, "WIDEN": widen,
            "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


QUACK = Tile(0, 0, 0, 0)
"""Used instead of a `Tile` for quack-kernels' symmetric GEMM, which selects its own tiles."""


@dataclass(frozen=True)
class Entry:
    """A table entry: the fastest tile for a problem, or None if the library is faster."""

    operation: Operation
    dtype: str
    batch: int
    rows: int
    cols: int
    tile: Tile | None

    def distance(self, batch: int, rows: int, cols: int) -> float:
        """Return the log2 distance to a problem with the same operation and dtype."""
        return (
            ROWS_WEIGHT * abs(math.log2(rows / self.rows))
            + abs(math.log2(cols / self.cols))
            + abs(math.log2(batch / self.batch))
        )


@constant_result
def small_problem(size: int, device: str) -> bool:
    """Return whether a batch of problems of this size is solved by a Triton kernel.

    `size` is the number of rows in each projected matrix, or the number of poles.
    """
    if not (listed(device) and size <= SMALL and has_triton()):
        return False
    import triton

    major, minor = map(int, triton.__version__.split(".")[:2])
    return (major, minor) >= DOUBLES


@lru_cache
def has_triton() -> bool:
    """Return whether triton is installed."""
    return importlib.util.find_spec("triton") is not None


@lru_cache
def has_quack() -> bool:
    """Return whether quack-kernels is installed."""
    return any(importlib.metadata.Distribution.discover(name="quack-kernels"))


@constant_result
def listed(device: str) -> bool:
    """Return whether the table has entries for a device's name or compute capability."""
    return bool(_keys(device))


def choose(operation: Operation, stacks: Sequence[Tensor]) -> Tile | None:
    """Select the tile for stacks `[batch, rows, cols]` with equal row counts. None means the
    library.

    Several stacks are looked up as a single stack with the mean column count of all matrices.
    """
    x, count = stacks[0], sum(len(s) for s in stacks)
    cols = sum(len(s) * s.shape[2] for s in stacks) // max(count, 1)
    dtype = str(x.dtype).removeprefix("torch.")
    return lookup(operation, count, x.shape[1], cols, dtype, device_name(x.device))


@constant_result
def lookup(
    operation: Operation, batch: int, rows: int, cols: int, dtype: str, device: str
) -> Tile | None:
    """Select the tile for a stack of `batch` `rows` x `cols` matrices, or None for the library."""
    keys = _keys(device) if min(batch, rows, cols) else []
    listed_entries = entries()[keys[-1]] if keys and has_triton() else ()
    same = (e for e in listed_entries if (e.operation, e.dtype) == (operation, dtype))
    # Quack's GEMM requires quack-kernels and rows whose size is a multiple of 16 bytes.
    quack = has_quack() and rows % 8 == cols % 8 == 0
    fitting = [e for e in same if quack or e.tile != QUACK]
    if not fitting:
        return None
    return min(fitting, key=lambda entry: entry.distance(batch, rows, cols)).tile


@constant_result
def device_name(device: torch.device) -> str:
    """Return a device's type or, for GPUs, a name such as "NVIDIA H100 80GB HBM3 (sm_90)"."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"


def _keys(device: str) -> list[str]:
    """Return the table's keys for a device, least specific first.

    A key is a device name prefix, or a list of capabilities such as "sm_80, sm_90".
    """
    kinds = {key for key in entries() for kind in key.split(", ") if device.endswith(f"({kind})")}
    names = {key for key in entries() if device.startswith(key)}
    return [*kinds, *sorted(names, key=len)]


@lru_cache
def entries() -> dict[str, tuple[Entry, ...]]:
    """Read the table, and return its entries by key (see `_keys`)."""
    devices = json.loads(TABLE.read_text(encoding="utf-8"))["devices"]
    return {name: tuple(map(_entry, device["entries"])) for name, device in devices.items()}


def _entry(row: dict[str, Any]) -> Entry:
    tile = None if row["tile"] is None else Tile(**row["tile"])
    problem = {key: row[key] for key in ("operation", "dtype", "batch", "rows", "cols")}
    return Entry(**problem, tile=tile)


def forget() -> None:
    """Clear the caches, so that a newly written table is picked up."""
    for function in (listed, small_problem, lookup, entries):
        function.cache_clear()  # type: ignore[union-attr]
