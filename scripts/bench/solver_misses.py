"""Count how many multiplier solves miss their tolerance, on momenta that record_run.py recorded.

    python scripts/bench/solver_misses.py momenta/*.safetensors --output solver.json

Per dtype of msign and number of evaluations: the number of units whose direction is not tangent to
within the tolerance, by the shorter side of the matrices, and in 16 bits the largest |f| of the
evaluation, which is taken out of the direction as a rounding error.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.command import command
from spectral import msign
from spectral.tangent import TOLERANCES, model_shifts, solve_multiplier

DTYPES = {"float16": torch.float16, "float32": torch.float32}


def stacks(paths: list[Path]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the momenta `[batch, rows, cols]`, of Frobenius norm 1, and u and v of each stack."""
    for path in paths:
        tensors = load_file(path)
        for name in sorted(name for name in tensors if name.startswith("m.")):
            m = tensors[name].float()
            m = m / torch.linalg.matrix_norm(m, keepdim=True)
            yield m, tensors[f"u.{name[2:]}"], tensors[f"v.{name[2:]}"]


def evaluated(m: Tensor, u: Tensor, v: Tensor, multiplier: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `f` of the multipliers by an msign in `dtype`."""
    z = m + multiplier[:, None, None] * u[:, :, None] * v[:, None]
    return torch.einsum("bi,bij,bj->b", u, msign(z, dtype=dtype).to(u.dtype), v)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("momenta", type=Path, nargs="+")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--evaluations", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    return parser.parse_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write the share of missed solves."""
    options = parse(arguments)
    torch.set_num_threads(1)
    rows: dict[tuple[int, str, int], list[float]] = {}
    rounding: dict[tuple[int, str, int], float] = {}
    for m, u, v in stacks(options.momenta):
        for dtype, evaluations in product(options.dtypes, options.evaluations):
            kind, key = DTYPES[dtype], (min(m.shape[1:]), dtype, evaluations)
            found = solve_multiplier(
                m, u, v, tolerance=TOLERANCES[kind], max_evaluations=evaluations, dtype=kind
            )
            rows.setdefault(key, []).extend(found.residual.abs().tolist())
            if kind.itemsize == 2:
                f = evaluated(m, u, v, found.multiplier, kind).abs().max().item()
                rounding[key] = max(f, rounding.get(key, 0.0))
    table = []
    for key, residuals in sorted(rows.items()):
        short, dtype, evaluations = key
        tolerance = TOLERANCES[DTYPES[dtype]]
        missed = sum(not residual <= tolerance for residual in residuals)
        table.append(
            {
                "rows": short, "dtype": dtype, "shifts": model_shifts(DTYPES[dtype]),
                "evaluations": evaluations, "units": len(residuals), "missed": missed,
                "largest |f|": max(residuals),
            }
        )  # fmt: skip
        if key in rounding:
            table[-1]["largest |f| removed"] = rounding[key]
        print(table[-1], flush=True)
    if options.output:
        options.output.write_text(json.dumps(table, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
