"""Count how many multiplier solves miss their tolerance, on momenta that record_run.py recorded.

    python scripts/bench/solver_misses.py momenta/*.safetensors --output solver.json

Per dtype of msign, number of resolvents in the model and of evaluations: the number of units whose
direction is not tangent to within the tolerance, by the shorter side of the matrices, and in 16
bits the largest |f| of the evaluation, which is taken out of the direction as a rounding error.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.command import command  # noqa: E402
from spectral import msign  # noqa: E402
from spectral.tangent import TOLERANCES, model_shifts, solve_multiplier  # noqa: E402

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
    parser.add_argument("--shifts", default="default", help="numbers, with commas between them")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--smallest", type=int, default=1, help="rows")
    return parser.parse_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write the share of missed solves."""
    options = parse(arguments)
    torch.set_num_threads(1)
    rows: dict[tuple[int, str, int, int], list[float]] = {}
    rounding: dict[tuple[int, str, int, int], float] = {}
    for m, u, v in stacks(options.momenta):
        short = min(m.shape[1:])
        if short < options.smallest:
            continue
        for size in options.shifts.split(","):
            for dtype in options.dtypes:
                kind = DTYPES[dtype]
                shifts = model_shifts(kind) if size == "default" else int(size)
                for evaluations in options.evaluations:
                    found = solve_multiplier(
                        m, u, v, tolerance=TOLERANCES[kind], max_evaluations=evaluations,
                        dtype=kind, shifts=shifts,
                    )  # fmt: skip
                    key = short, dtype, shifts, evaluations
                    rows.setdefault(key, []).extend(found.residual.abs().tolist())
                    if kind.itemsize == 2:
                        f = evaluated(m, u, v, found.multiplier, kind).abs().max().item()
                        rounding[key] = max(f, rounding.get(key, 0.0))
    table = []
    for (short, dtype, shifts, evaluations), residuals in sorted(rows.items()):
        tolerance = TOLERANCES[DTYPES[dtype]]
        missed = sum(not residual <= tolerance for residual in residuals)
        table.append(
            {
                "rows": short, "dtype": dtype, "shifts": shifts, "evaluations": evaluations,
                "units": len(residuals), "missed": missed, "largest |f|": max(residuals),
            }
        )  # fmt: skip
        if (short, dtype, shifts, evaluations) in rounding:
            table[-1]["largest |f| removed"] = rounding[short, dtype, shifts, evaluations]
        print(table[-1], flush=True)
    if options.output:
        options.output.write_text(json.dumps(table, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
