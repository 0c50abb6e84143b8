"""Measure how accurate msign and SSO's direction are, by steps and dtype.

    python scripts/bench/msign.py --json benchmarks/results/msign.json

The matrices are the momenta of tests/data/momenta.safetensors, recorded in training, of 128 x 128,
256 x 128 and 128 x 256. For each setting it gives the relative Frobenius error against the polar
factor by a float64 SVD, its mean and worst; what the singular values above a thousandth of the
Frobenius norm become, least and greatest; and the largest |f| = |<u v^T, direction>| of SSO after
one evaluation.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench.measure import print_table, record, write_json
from scripts.command import add_json, command
from spectral import msign, solve_multiplier

MOMENTA = ROOT / "tests/data/momenta.safetensors"
SETTINGS = [
    (schedule, steps, dtype)
    for schedule, steps in (("polar_express", 8), ("polar_express", 5), ("simple", 5))
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
]
LEAST = 1e-3
"""Singular values below it, of a matrix of Frobenius norm 1, have no gain of interest."""


def accuracy(matrix: Tensor, u: Tensor, v: Tensor, **options: Any) -> tuple[float, ...]:
    """Error, least and greatest gain, and |f|, of one matrix `[1, rows, cols]` of norm 1."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    exact, ours = left @ right, msign(matrix, **options).double()
    gains = (left.mT @ ours @ right.mT).diagonal(dim1=-2, dim2=-1)[values > LEAST]
    tangent = solve_multiplier(matrix, u, v, tolerance=5e-3, **options)
    error = (ours - exact).norm() / exact.norm()
    return error.item(), gains.min().item(), gains.max().item(), tangent.residual.abs().item()


def measure(schedule: str, steps: int, dtype: torch.dtype) -> dict[str, Any]:
    """A row of the table."""
    stored = load_file(MOMENTA)
    names = [name.removeprefix("momentum.") for name in stored if name.startswith("momentum.")]
    found = []
    for name in names:
        matrix = stored[f"momentum.{name}"].float()[None]
        pair = (stored[f"{side}.{name}"][None] for side in "uv")
        matrix /= matrix.norm()
        found.append(accuracy(matrix, *pair, schedule=schedule, steps=steps, dtype=dtype))
    errors, least, greatest, residuals = zip(*found, strict=True)
    return {
        "schedule": schedule,
        "steps": steps,
        "dtype": str(dtype).removeprefix("torch."),
        "error": sum(errors) / len(errors),
        "worst error": max(errors),
        "least gain": min(least),
        "greatest gain": max(greatest),
        "largest |f|": max(residuals),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_json(parser)
    return parser.parse_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each setting, and write them."""
    options = parse(arguments)
    rows = [measure(*setting) for setting in SETTINGS]
    print_table(rows)
    content = record("scripts/bench/msign.py", arguments, torch.device("cpu"), {"settings": rows})
    write_json(options.json, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
