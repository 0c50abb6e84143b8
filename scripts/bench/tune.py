"""Time the Triton kernels against the vendor library and write the dispatcher's table.

    python scripts/bench/tune.py                       # all default problems; minutes on a GPU
    python scripts/bench/tune.py --problems 1x2048x2048 32x128x2048 --dtypes bfloat16

A problem is BATCHxROWSxCOLUMNS. For each problem, dtype and operation, the library and every tile
are timed with CUDA events. The fastest one becomes the device's entry in
spectral/kernels/table.json, along with the date and versions. Entries for other devices are left
unchanged. If a tile's result differs from the library's result by more than rounding error, the
tile is not selected and the script exits with 1. Times are medians over single calls with a cold L2
cache.
"""

import argparse
import datetime
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.measure import milliseconds
from scripts.command import command, new_parser, output_path
from spectral.kernels import dispatch, library, symmetric
from spectral.kernels.dispatch import OPERATIONS, Operation, Tile
from training.errors import InputError

PROBLEMS = tuple(
    f"{batch}x{rows}x{cols}"
    for batch in (1, 4, 32)
    for rows, cols in ((128, 2048), (512, 2048), (1024, 1024), (1024, 4096), (2048, 2048),
                       (2048, 6144), (4096, 4096), (8192, 8192))
    if batch * rows * cols <= 2**28
)  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALF_TILES = (
    Tile(128, 64, 8, 4), Tile(128, 64, 8, 3), Tile(128, 32, 8, 4), Tile(64, 64, 4, 4),
    Tile(64, 32, 4, 4),
)  # fmt: skip
SINGLE_TILES = (
    Tile(128, 32, 8, 3, "tf32x3"), Tile(64, 32, 4, 3, "tf32x3"), Tile(64, 32, 8, 3, "ieee"),
)  # fmt: skip
Call = Callable[[], Tensor]


def candidates(dtype: str) -> tuple[Tile, ...]:
    """Return the tiles to try for a dtype."""
    if dtype == "float32":
        return SINGLE_TILES
    return (*HALF_TILES, dispatch.QUACK) if dispatch.has_quack() else HALF_TILES


def calls(operation: Operation, x: Tensor) -> tuple[Call, Callable[..., Tensor]]:
    """Return functions that run an operation on `x` `[batch, rows, cols]`: with the vendor library,
    and with our kernel. The second function takes a tile as its last argument.

    "commuting" and "polynomial" are operations in msign's first step. "grouped" computes the Gram
    matrices of two stacks: `x`, and the first half of its columns.
    """
    if operation == "gram":
        return partial(library.symmetric, x), partial(symmetric.product, x, x)
    if operation == "grouped":
        stacks = [x, x[:, :, : -(-x.shape[2] // 2)]]

        def grams() -> Tensor:
            return torch.cat([library.symmetric(stack) for stack in stacks])

        return grams, partial(symmetric.grams, stacks)
    r = library.symmetric(x)
    r = r / torch.linalg.matrix_norm(r, keepdim=True)
    a, b, c = 4.1, -2.9, 0.5
    polynomial = partial(library.symmetric, r, r, r, alpha=c, beta=b, diagonal=a)
    if operation == "polynomial":
        return polynomial, partial(symmetric.product, r, r, s=r, alpha=c, beta=b, gamma=a)
    p = polynomial()
    return partial(library.symmetric, p, r), partial(symmetric.product, p, r)


def agrees(result: Tensor, expected: Tensor) -> bool:
    """Return whether two matmul results differ only by rounding.

    The bfloat16 bound also allows truncation instead of rounding.
    """
    bounds = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
    error = (result.float() - expected.float()).abs().max()
    return bool(error <= bounds[result.dtype] * expected.float().abs().max())


def measure(
    problem: str, dtype: str, only: tuple[Tile, ...] | None, device: torch.device, repeats: int
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Measure one problem. Yield table entries, each with a flag that is False if the operation
    gave a wrong result with any tile.

    Each operation yields one or two entries. `only` lists the tiles to measure; None means all
    candidates.
    """
    batch, rows, cols = map(int, problem.split("x"))
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(batch, rows, cols, device=device, generator=generator)
    x = (x / torch.linalg.matrix_norm(x, keepdim=True)).to(DTYPES[dtype])
    for operation in OPERATIONS:
        by_library, by_kernel = calls(operation, x)
        ways: dict[Tile | None, Call] = {None: by_library}
        for kernel in only or candidates(dtype):
            if operation != "grouped" or kernel != dispatch.QUACK:  # quack needs a single stack
                ways[kernel] = partial(by_kernel, kernel)
        expected = ways[None]().clone()
        right = {tile: call for tile, call in ways.items() if agrees(call(), expected)}
        times = {tile: milliseconds(call, device, repeats) for tile, call in right.items()}
        best = min(times, key=lambda tile: times[tile])
        wrong = [str(tile) for tile in ways if tile not in right]
        print(
            f"{operation:<12}{dtype:<10}{problem:<16} library {times[None]:9.4f} ms"
            f"  best {times[best]:9.4f} ms  {times[None] / times[best]:5.2f}x"
            f"  {'library' if best is None else best}"
            + (f"  WRONG RESULT: {', '.join(wrong)}" if wrong else ""),
            flush=True,
        )
        # The dispatcher uses the first usable entry. If quack is fastest, add a second entry for
        # installations without it.
        others = [tile for tile in times if tile != dispatch.QUACK]
        # The size that the dispatcher uses to look up the operation on `x`.
        square = operation in ("commuting", "polynomial")
        size = {"batch": batch, "rows": rows, "cols": rows if square else cols}
        if operation == "grouped":
            size = {"batch": 2 * batch, "rows": rows, "cols": (cols + -(-cols // 2)) // 2}
        for tile in dict.fromkeys([best, min(others, key=lambda tile: times[tile])]):
            entry = {
                "operation": operation, "dtype": dtype, **size,
                "tile": None if tile is None else asdict(tile), "library_ms": round(times[None], 5),
                "best_ms": round(times[tile], 5),
            }  # fmt: skip
            yield entry, not wrong


def written(table: dict[str, Any]) -> str:
    """Return the table as JSON with one entry per line."""
    text = json.dumps({**table, "devices": {}}, indent=2).removesuffix("{}\n}") + "{\n"
    devices = []
    for name, device in table["devices"].items():
        lines = ",\n".join(f"        {json.dumps(entry)}" for entry in device["entries"])
        devices.append(
            f'    {json.dumps(name)}: {{\n      "measured": {json.dumps(device["measured"])},\n'
            f'      "entries": [\n{lines}\n      ]\n    }}'
        )
    return text + ",\n".join(devices) + "\n  }\n}\n"


def parse_tile(text: str) -> Tile:
    """Parse a tile given as "BLOCKxDEPTH:WARPS:STAGES" or "BLOCKxDEPTH:WARPS:STAGES:PRECISION"."""
    sizes, warps, stages, *precision = text.split(":")
    block, depth = map(int, sizes.split("x"))
    return Tile(block, depth, int(warps), int(stages), *precision)  # type: ignore[arg-type]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--device", default="cuda", help="device (default: cuda)")
    parser.add_argument(
        "--problems", nargs="+", default=PROBLEMS, metavar="BxRxC", help="shapes to measure"
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        default=list(DTYPES),
        choices=DTYPES,
        help="dtypes to measure; by default, all of them",
    )
    parser.add_argument(
        "--tiles",
        nargs="+",
        type=parse_tile,
        metavar="BxD:W:S[:PRECISION]",
        help="tiles to try (default: all candidates)",
    )
    parser.add_argument(
        "--repeats", type=int, default=25, help="number of timed calls per tile (default: 25)"
    )
    parser.add_argument(
        "--output",
        type=output_path,
        default=dispatch.TABLE,
        help="output table (default: spectral/kernels/table.json)",
    )
    return parser.parse_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the table. Return 1 if any kernel computed a wrong result."""
    options = parse(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"--device {options.device} requires CUDA, but torch found no device")
    entries, right = [], True
    for problem in options.problems:
        for dtype in options.dtypes:
            only = tuple(options.tiles) if options.tiles else None
            for entry, fine in measure(problem, dtype, only, device, options.repeats):
                entries.append(entry)
                right = right and fine
    table = json.loads(dispatch.TABLE.read_text(encoding="utf-8"))
    name = dispatch.device_name(device)
    measured = {
        "date": datetime.date.today().isoformat(), "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"), "repeats": options.repeats,
    }  # fmt: skip
    # The dispatcher uses the longest key that is a prefix of the device name, so shorter keys such
    # as "NVIDIA H100" apply to devices that were not measured.
    table["devices"] = {name: {"measured": measured, "entries": entries}} | {
        other: value for other, value in table["devices"].items() if other != name
    }
    options.output.write_text(written(table), encoding="utf-8")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
