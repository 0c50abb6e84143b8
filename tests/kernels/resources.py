"""Resources of a streaming multiprocessor that each kernel uses, computed without a GPU.

Kernels are compiled for compute capability 9.0 (H100, H200), as a launch for large contiguous
matrices would.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from spectral.kernels import gated, heads, small, symmetric, update
from spectral.kernels.dispatch import SMALL, VECTORS, Tile
from spectral.kernels.launches import Launch, observe

CAPABILITY = 90
HALF: Final[dict[str, Any]] = {"dtype": torch.bfloat16, "device": "meta"}
FAST = Tile(128, 64, 8, 4)
SHARED_LIMIT = 232448
"""Maximum shared memory per program on an H100 or H200, in bytes."""
ROWS, COLS = 2064, 2048
"""Matrix sizes, which are multiples of 16, as is usual, but not of the tile sizes."""


def calls() -> dict[str, Callable[[], object]]:
    """Return a function for every kernel that launches it on tensors on device "meta"."""
    narrow = _matrices(ROWS, COLS, dtype=torch.bfloat16)
    square, wide = _matrices(ROWS, ROWS, dtype=torch.bfloat16), _matrices(ROWS, COLS)
    rate, gate = torch.empty(2, device="meta"), torch.empty((), dtype=torch.bool, device="meta")
    block = _matrices(2, 40, batch=3, dtype=torch.float64)
    found: dict[str, Callable[[], object]] = {
        "polynomial": partial(symmetric.product, square, square, FAST, square),
        "gram tf32x3": partial(symmetric.product, wide, wide, Tile(64, 32, 4, 3, "tf32x3")),
        "gram ieee": partial(symmetric.product, wide, wide, Tile(64, 32, 8, 3, "ieee")),
        "commuting": partial(symmetric.product, square, square, FAST),
        "grouped": partial(symmetric.grams, [narrow] * symmetric.STACKS, FAST),
        "update": partial(update.update_, wide, narrow, rate, rate, gate, rate),
        "momentum": partial(update.average_, wide, wide, 0.95, gate, nesterov=True),
        "root": partial(small.root, block, block[0], block[0, :, 0], 2, 512),
    }
    wide, query = torch.empty(16, 4096, **HALF), torch.empty(16, 2, 16, 128, **HALF)
    scale, turns = torch.empty(16, device="meta"), torch.empty(16, 1, 1, 1, 256, device="meta")
    of_group = torch.empty(16, 2, 8, 2, 128, **HALF)
    normed = of_group, of_group[:, :, :, :1], query[0, 0, 0], query[0, 0, 0]
    given = query, query[:, :, :8], query[:, :, :8], turns, 1e-5
    found |= {
        "swiglu": partial(gated.gradients, wide[:, 2048:], wide, tanh=False),
        "scaled geglu": partial(gated.gradients, wide[:, 2048:], wide, scale, tanh=True),
        "heads": partial(heads.gradients, *given),
        "normed heads": partial(heads.gradients, *given, *normed),
    }
    for size in (32, SMALL):
        t = _matrices(size - 1, size - 1, dtype=torch.float64)
        found[f"eigenvector {size}"] = partial(small.top_eigenvector, t, (7, 7, 7), 1e-300)
    for size in (16, VECTORS):
        vectors = _matrices(size - 1, 1032)
        found[f"orthonormal {size}"] = partial(small.orthonormal, vectors, 1e-10)
    return found


def _matrices(
    rows: int, cols: int, *, batch: int = 2, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.empty(batch, rows, cols, dtype=dtype, device="meta")


def compiled(call: Callable[[], object]) -> tuple[int, bool]:
    """Compile the single kernel that `call` launches on tensors on device "meta".

    Returns the bytes of shared memory per program, and whether the kernel uses tensor cores.
    """
    real, found = JITFunction.run, list[Launch]()
    observe(found.append)
    try:
        call()
    finally:
        JITFunction.run = real
    (launch,) = found
    result = launch.compile_for(CAPABILITY)
    return result.metadata.shared, bool(re.search(r"\bw?g?mma\.", result.asm["ptx"]))
