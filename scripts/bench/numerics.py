"""Measure errors of msign and the tangent multiplier in 16 and 32 bits, on recorded momenta.

    python scripts/bench/numerics.py

Products are computed on a CPU in the named dtype: operands and results are rounded to it, sums are
float32. Columns are means over the momenta (largest in brackets):

polynomial   ||msign - P|| / ||P||, Frobenius, P the same polynomials on a float64 SVD
polar        ||msign - U V^T|| / ||U V^T||
|f|          |<Theta, direction>| of the direction that the solver returns, in float64
exact |f|    |<Theta, U V^T of M + multiplier Theta>|, in float64
direction    ||direction - D|| / ||D||, D the exact tangent direction
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench.record import record, write_json
from scripts.command import add_json, command
from spectral.polar import msign
from spectral.schedules import coefficients
from spectral.tangent import EVALUATIONS, solve_multiplier
from training.report.table import markdown_table

MOMENTA = ROOT / "tests/data/momenta.safetensors"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SCHEDULES = (("polar_express", 5), ("cans", 5), ("polar_express", 8))
"""Name and steps: a prefix of the eight steps, five that are optimal as five, and all eight."""
COLUMNS = ("steps, dtype", "polynomial", "polar", "\\|f\\|", "exact \\|f\\|", "direction")
TOLERANCE = 2e-4


@dataclass(frozen=True)
class Recorded:
    """Momenta of one shape: M `[batch, rows, cols]` of Frobenius norm 1, the weight's top singular
    pair, and the exact multiplier `[batch]`; float64."""

    m: Tensor
    u: Tensor
    v: Tensor
    multiplier: Tensor


@dataclass
class Row:
    """One setting; every figure is (mean, largest)."""

    schedule: str
    steps: int
    dtype: str
    polynomial: tuple[float, float]
    polar: tuple[float, float]
    f: tuple[float, float]
    exact_f: tuple[float, float]
    direction: tuple[float, float]


def recorded(path: Path) -> list[Recorded]:
    """The momenta in a file that record_momenta.py wrote, one stack per shape."""
    tensors = {name: value.double() for name, value in load_file(path).items()}
    with safe_open(path, "pt") as file:
        samples = json.loads(file.metadata()["samples"])
    shapes: dict[tuple[int, ...], list[int]] = {}
    for i in range(len(samples)):
        shapes.setdefault(tuple(tensors[f"momentum.{i}"].shape), []).append(i)
    stacks = []
    for indices in shapes.values():
        m, u, v = (
            torch.stack([tensors[f"{k}.{i}"] for i in indices]) for k in ("momentum", "u", "v")
        )
        m = m / torch.linalg.matrix_norm(m, keepdim=True)
        exact = m.new_tensor([samples[i]["multiplier"] for i in indices])
        stacks.append(Recorded(m, u, v, exact))
    return stacks


def polar(x: Tensor) -> Tensor:
    """The polar factor of each matrix."""
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    return left @ right


def polynomials(x: Tensor, schedule: str, steps: int) -> Tensor:
    """msign's polynomials applied to the singular values of `x / ||x||`."""
    left, s, right = torch.linalg.svd(x, full_matrices=False)
    s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    for a, b, c in coefficients(schedule, steps):
        s = a * s + b * s**3 + c * s**5
    return left @ torch.diag_embed(s) @ right


def relative(x: Tensor, y: Tensor) -> Tensor:
    """||x - y|| / ||y|| `[batch]`, Frobenius."""
    return torch.linalg.matrix_norm(x - y) / torch.linalg.matrix_norm(y)


def along(x: Tensor, each: Recorded) -> Tensor:
    """|<Theta, x>| `[batch]`."""
    return torch.einsum("bi,bij,bj->b", each.u, x, each.v).abs()


def errors(each: Recorded, schedule: str, steps: int, dtype: str) -> list[Tensor]:
    """The columns of the table for one stack, `[batch]` each."""
    theta = each.u[:, :, None] * each.v[:, None, :]
    m, u, v = each.m.float(), each.u.float(), each.v.float()
    ours = msign(m, schedule=schedule, steps=steps, dtype=DTYPES[dtype]).double()
    solved = solve_multiplier(
        m, u, v, tolerance=TOLERANCE, max_evaluations=EVALUATIONS, schedule=schedule,
        steps=steps, dtype=DTYPES[dtype],
    )  # fmt: skip
    direction, found = solved.direction.double(), solved.multiplier.double()
    return [
        relative(ours, polynomials(each.m, schedule, steps)),
        relative(ours, polar(each.m)),
        along(direction, each),
        along(polar(each.m + found[:, None, None] * theta), each),
        relative(direction, polar(each.m + each.multiplier[:, None, None] * theta)),
    ]


def measure(stacks: list[Recorded], schedule: str, steps: int, dtype: str) -> Row:
    """One row of the table, over all stacks."""
    columns = zip(*(errors(each, schedule, steps, dtype) for each in stacks), strict=True)
    figures = [(float(x.mean()), float(x.max())) for x in map(torch.cat, columns)]
    return Row(schedule, steps, dtype, *figures)


def cells(row: Row) -> list[str]:
    """The cells of a row in Markdown."""
    pairs = (row.polynomial, row.polar, row.f, row.exact_f, row.direction)
    figures = (f"{mean:.1e} ({largest:.1e})" for mean, largest in pairs)
    return [f"{row.steps} {row.schedule}, {row.dtype}", *figures]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_json(parser)
    return parser.parse_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table in Markdown."""
    options = parse(arguments)
    stacks = recorded(MOMENTA)
    rows = [measure(stacks, *each, dtype) for each in SCHEDULES for dtype in DTYPES]
    print(markdown_table(COLUMNS, map(cells, rows)), end="")
    figures = {"rows": [asdict(row) for row in rows]}
    device = torch.device("cpu")
    write_json(options.json, record("scripts/bench/numerics.py", arguments, device, figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
