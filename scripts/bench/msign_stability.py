"""Measure the largest singular value that msign makes in 16 bits, of thousands of matrices.

    python scripts/bench/msign_stability.py --output benchmarks/results/msign_stability.json

Three kinds of input, each in bfloat16 and float16 with the form that `auto` takes there:

momenta     16 recorded ones of a bfloat16 run, which once made the Gram form diverge
gradients   matrices like gradients, at the unit shapes of all recipes: dY^T X of few tokens whose
            activations have a mean direction and outlier channels
search      hill climbing from random spectra at small shapes, for every polynomial

No singular value of an output may exceed 1.1 (polynomials that do not converge: what they make of
[0, 1], with 10% more). Those of matrices with up to `EXACT` rows come from an SVD of the output in
float64, those of larger ones from a power iteration in float32. Seeds are in the output.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.command import command
from spectral.polar import msign
from spectral.schedules import SCHEDULES, coefficients, largest_value

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
LIMIT = 1.1
EXACT = 128
STEPS = 8
# (rows, cols) of the units of whole-matrix rules of all recipes up to 2,816 on the longer side,
# transposes left out, as msign transposes tall matrices.
SMALL = [
    (24, 48), (32, 32), (32, 48), (32, 64), (32, 96), (32, 128), (32, 1024), (40, 64), (48, 128),
    (64, 128), (64, 1024), (64, 2048), (128, 128), (128, 192), (128, 352), (128, 512), (128, 768),
    (128, 2048),
]  # fmt: skip
MEDIUM = [(192, 1536), (192, 2048), (512, 1024), (512, 1536), (768, 768), (768, 2048)]
LARGE = [(1024, 1024), (1024, 2816), (2048, 2048), (1408, 2048)]
TOKENS = (16, 64, 256, 512)


@dataclass
class Found:
    """Outputs of one kind, shape, polynomial and dtype.

    Attributes:
        worst: largest singular value of any of them.
        limit: the largest that is allowed.
        broken: how many have NaN or infinity.
    """

    kind: str
    shape: tuple[int, int]
    schedule: str
    dtype: str
    count: int
    worst: float
    limit: float
    broken: int

    @property
    def holds(self) -> bool:
        """Whether nothing is broken or above the limit."""
        return not self.broken and self.worst <= self.limit


def gradient_like(shape: tuple[int, int], count: int, generator: torch.Generator) -> Tensor:
    """Draw `[count, rows, cols]`, each `dY^T X` of a random number of tokens."""

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    rows, cols = shape
    drawn = []
    for _ in range(count):
        tokens = TOKENS[int(torch.randint(len(TOKENS), (), generator=generator))]
        x = (normal(tokens, cols) + 2 * normal(cols)) * (0.7 * normal(cols)).exp()
        dy = normal(tokens, rows) * normal(tokens, 1).exp() * (0.7 * normal(rows)).exp()
        drawn.append(dy.mT @ x)
    return torch.stack(drawn)


def largest(x: Tensor) -> Tensor:
    """Compute the largest singular value of each `x` `[batch, rows, cols]`, NaN if not finite."""
    x = x.mT if x.shape[-2] > x.shape[-1] else x
    if x.shape[-2] <= EXACT:
        wide = x.double()
        values = torch.linalg.eigvalsh(torch.nan_to_num(wide @ wide.mT))[:, -1].clamp_min(0).sqrt()
    else:
        v = torch.ones(len(x), x.shape[-1], 1) + torch.arange(x.shape[-1])[:, None] % 7
        wide = torch.nan_to_num(x.float())
        for _ in range(30):
            v = wide.mT @ (wide @ v)
            v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True)
        values = torch.linalg.vector_norm(wide @ v, dim=1)[:, 0]
    return torch.where(x.isfinite().flatten(1).all(1), values, torch.nan)


def limit_of(schedule: str, dtype: str) -> float:
    """Return the largest singular value that is allowed of an output."""
    return LIMIT * max(1.0, largest_value(coefficients(schedule, STEPS, DTYPES[dtype])))


def judged(kind: str, x: Tensor, dtype: str, schedule: str = "polar_express") -> Found:
    """Return what msign makes of `x` `[batch, rows, cols]`."""
    sigma = largest(msign(x, schedule=schedule, steps=STEPS, dtype=DTYPES[dtype]))
    rows, cols = x.shape[-2:]
    broken = int(sigma.isnan().sum())
    worst = float(sigma.nan_to_num(0).max())
    limit = limit_of(schedule, dtype)
    return Found(kind, (rows, cols), schedule, dtype, len(x), worst, limit, broken)


def gradients(
    shapes: list[tuple[int, int]], count: int, seed: int, seconds: float = float("inf")
) -> Iterator[Found]:
    """Yield what msign makes of `count` matrices of the shapes in turn, until time is up."""
    generator = torch.Generator().manual_seed(seed)
    end, left = time.monotonic() + seconds, count
    while left > 0 and time.monotonic() < end:
        for shape in shapes:
            share = -(-count // len(shapes))
            size = min(left, share, max(1, min(100, 2**21 // (shape[0] * shape[1]))))
            if size <= 0 or time.monotonic() >= end:
                break
            x = gradient_like(shape, size, generator)
            left -= size
            for dtype in DTYPES:
                yield judged("gradients", x, dtype)


def search(
    shape: tuple[int, int], schedule: str, dtype: str, steps: int, seed: int, batch: int = 16
) -> Found:
    """Climb to the largest output from random matrices, `steps` times, beginning anew in between.

    Each step changes the logarithms of the singular values and turns both sides a little, and keeps
    what makes an output grow. Every tenth of the steps begins with new matrices.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, cols = shape

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    worst, broken = 0.0, 0
    best = value = torch.zeros(())
    for step in range(steps):
        if step % max(1, steps // 10) == 0:
            u = torch.linalg.qr(normal(batch, rows, rows)).Q
            v = torch.linalg.qr(normal(batch, cols, rows)).Q
            spread = torch.rand((batch, 1), generator=generator) * 5
            best = (u * torch.pow(10, -spread * normal(batch, rows).abs())[:, None]) @ v.mT
            trial = best
            value = torch.zeros(batch)
        else:
            size = 10 ** (-3 * torch.rand((batch, 1, 1), generator=generator))
            u, s, vh = torch.linalg.svd(best, full_matrices=False)
            s = s * (size[:, 0] * normal(batch, rows)).exp()
            turned = torch.linalg.qr(u + size * 0.1 * normal(batch, rows, rows)).Q
            trial = (turned * s[:, None]) @ vh
        sigma = largest(msign(trial, schedule=schedule, steps=STEPS, dtype=DTYPES[dtype]))
        broken += int(sigma.isnan().sum())
        sigma = sigma.nan_to_num(0).float()
        better = sigma > value
        best = torch.where(better[:, None, None], trial, best)
        value = torch.where(better, sigma, value)
        worst = max(worst, float(sigma.max()))
    count = steps * batch
    limit = limit_of(schedule, dtype)
    return Found("search", shape, schedule, dtype, count, worst, limit, broken)


def searches(steps: int, seed: int) -> Iterator[Found]:
    """Yield a search for every small shape, polynomial and dtype, of `steps` steps in all."""
    cases = [
        (shape, schedule, dtype)
        for shape in ((2, 4), (4, 8), (8, 16))
        for schedule in SCHEDULES
        for dtype in DTYPES
    ]
    for number, case in enumerate(cases):
        yield search(*case, steps=-(-steps // len(cases)), seed=seed + number)


def recorded() -> Iterator[Found]:
    """Yield what msign makes of the recorded momenta, for every polynomial."""
    momenta = load_file(ROOT / "tests/data/diverging_momenta.safetensors")["momentum"].float()
    for schedule in SCHEDULES:
        for dtype in DTYPES:
            yield judged("momenta", momenta, dtype, schedule)


def joined(each: Iterator[Found]) -> list[Found]:
    """Join what has the same kind, shape, polynomial and dtype."""
    found: dict[tuple[object, ...], Found] = {}
    for one in each:
        key = one.kind, one.shape, one.schedule, one.dtype
        if key in found:
            old = found[key]
            old.count += one.count
            old.worst = max(old.worst, one.worst)
            old.broken += one.broken
        else:
            found[key] = one
    return list(found.values())


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=10_000, help="matrices like gradients")
    parser.add_argument("--medium", type=int, default=300, help="of these, with 192 to 768 rows")
    parser.add_argument("--large", type=int, default=300, help="of these, with 1,024 rows and more")
    parser.add_argument("--search", type=int, default=30_000, help="steps of the search")
    parser.add_argument("--seconds", type=float, default=3600, help="for the large ones")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all kinds of input and write the figures after each."""
    options = parse(arguments)
    torch.set_num_threads(1)
    small = options.count - options.medium - options.large
    parts = {
        "momenta": recorded(),
        "small": gradients(SMALL, small, options.seed),
        "search": searches(options.search, options.seed + 100),
        "medium": gradients(MEDIUM, options.medium, options.seed + 1),
        "large": gradients(LARGE, options.large, options.seed + 2, options.seconds),
    }
    content: dict[str, object] = {"seed": options.seed, "torch": torch.__version__}
    for name, each in parts.items():
        found = joined(each)
        worst = {
            dtype: max((f.worst / f.limit for f in found if f.dtype == dtype), default=0.0)
            for dtype in DTYPES
        }
        summary = {
            "matrices": sum(f.count for f in found if f.dtype == "float16"),
            "broken": sum(f.broken for f in found),
            "holds": all(f.holds for f in found),
            "worst, of the limit": worst,
        }
        content[name] = summary | {"rows": [asdict(f) for f in found]}
        print(name, summary, flush=True)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
