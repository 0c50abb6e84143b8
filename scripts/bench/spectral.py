"""Time and memory of our optimizer steps beside a slow reference and torch.optim.Muon, in one run.

    python scripts/bench/spectral.py --quick
    python scripts/bench/spectral.py --layer dense-1.7b --dtype bfloat16 --json result.json

Each side steps the same units from the same weights, momenta and gradients, one thread count for
all; the sides take turns, and the best of `--repeats` counts. Times are processor time of this
process, one thread by default, which other work on the machine disturbs least. Momenta are aligned
with the weight's top singular direction, as measured in training (mean |f(0)| 0.4 to 0.6), because
unaligned Gaussian momenta flatter every solver. Prints a table; `--json` also writes every figure
with the machine's description.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import slow_reference  # noqa: E402
from scripts.bench.live_bytes import peak_bytes  # noqa: E402
from spectral.power_iteration import cold_start  # noqa: E402
from spectral.rules import RULES, State  # noqa: E402

LR, BETA, WEIGHT_DECAY, TOLERANCE, STEPS = 5e-3, 0.9, 0.1, 2e-4, 8
ALIGNMENT = 0.6  # times min(shape)^-1/2, the size of the gradient's part along Theta: |f(0)| = 0.5
# The units of one layer, with q, k and v split into heads: shape -> how many.
LAYERS: dict[str, dict[tuple[int, int], int]] = {
    "dense-1.7b": {(128, 2048): 32, (2048, 2048): 1, (6144, 2048): 2, (2048, 6144): 1},
    "llama-271m": {(64, 1024): 48, (1024, 1024): 1, (2816, 1024): 2, (1024, 2816): 1},
    "quick": {(32, 256): 12, (256, 256): 1, (704, 256): 2},
}
KINDS = ("muon", "muon_sphere", "spectral_sphere")


@dataclass
class Row:
    """One line of the table."""

    units: str
    kind: str
    side: str
    milliseconds: float
    evaluations: float
    worst_residual: float
    peak_units: float | None = None


@dataclass
class Side:
    """One competitor: what each step needs afresh, untimed, and the step itself."""

    step: Callable[[], tuple[float, float]]
    """Returns mean evaluations and the worst |f|."""
    prepare: Callable[[], object] = lambda: None


class Units:
    """Equal-shaped units with a persistent, aligned gradient, fresh for every measurement."""

    def __init__(self, shape: tuple[int, int], count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = 0.02 * torch.randn(count, *shape, generator=generator)
        sigma, self.u, self.v = cold_start(self.weight)
        self.weight *= (shape[0] / shape[1]) ** 0.5 / sigma[:, None, None]
        noise = torch.randn(count, *shape, generator=generator)
        noise /= torch.linalg.vector_norm(noise, dim=(-2, -1), keepdim=True)
        size = ALIGNMENT / min(shape) ** 0.5
        self.grad = noise + size * self.u[:, :, None] * self.v[:, None]

    def fresh(self) -> tuple[Tensor, Tensor]:
        """Copies of the weights and gradients."""
        return self.weight.clone(), self.grad.clone()


def ours(kind: str, units: Units, dtype: str | None) -> Side:
    """Our rule. It consumes the gradient, which a training step computes afresh anyway."""
    rule = RULES[kind](momentum=BETA, steps=STEPS, msign_dtype=dtype)  # type: ignore[call-arg]
    weight, grad = units.fresh()
    state: State = rule.init_state(weight)

    def step() -> tuple[float, float]:
        report = rule.step(weight, grad, state, lr=LR, weight_decay=WEIGHT_DECAY)
        if kind != "spectral_sphere":
            return 1.0, 0.0
        return float(report["evaluations"].mean()), float(report["residual"].abs().max())

    return Side(step, lambda: grad.copy_(units.grad))


def slow(kind: str, units: Units, dtype: torch.dtype) -> Side:
    """The same step by the slow reference, a Python loop over the units."""
    weight, grad = units.fresh()
    momentum = torch.zeros_like(weight)

    def step() -> tuple[float, float]:
        results = [
            slow_reference.step(
                kind, w, g, m, lr=LR, beta=BETA, weight_decay=WEIGHT_DECAY, tolerance=TOLERANCE,
                dtype=dtype,
            )
            for w, g, m in zip(weight, grad, momentum, strict=True)
        ]  # fmt: skip
        return sum(r[0] for r in results) / len(results), max(r[1] for r in results)

    return Side(step)


def torch_muon(units: Units) -> Side:
    """torch.optim.Muon on the same units, which always computes in bfloat16."""
    weight, grad = units.fresh()
    parameters = [torch.nn.Parameter(w) for w in weight]
    for p, g in zip(parameters, grad, strict=True):
        p.grad = g
    optimizer = torch.optim.Muon(
        parameters, lr=LR, weight_decay=WEIGHT_DECAY, momentum=BETA, ns_steps=STEPS
    )

    def step() -> tuple[float, float]:
        optimizer.step()
        return 1.0, 0.0

    return Side(step)


def best_times(sides: dict[str, Side], repeats: int) -> dict[str, tuple[float, float, float]]:
    """Best seconds, mean evaluations and worst residual of each side, taking turns."""
    results = {name: (float("inf"), 0.0, 0.0) for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            # The slow reference needs no warm-up and takes minutes: it skips the first turn.
            if name == "slow reference" and repeat == 0:
                continue
            side.prepare()
            start = time.process_time()
            evaluations, residual = side.step()
            seconds = time.process_time() - start
            if repeat == 0:
                continue
            results[name] = (min(results[name][0], seconds), evaluations, residual)
    return results


def measure(layer: str, dtype: str, repeats: int, reference: bool) -> list[Row]:
    """All rows of one layer."""
    rows = []
    kind_of = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    for shape, count in LAYERS[layer].items():
        units = Units(shape, count)
        for kind in KINDS:
            sides = {"ours": ours(kind, units, None if dtype == "float32" else dtype)}
            if reference:
                sides["slow reference"] = slow(kind, units, kind_of)
            if kind == "muon" and dtype == "bfloat16":
                sides["torch.optim.Muon"] = torch_muon(units)
            for side, (seconds, evaluations, residual) in best_times(sides, repeats).items():
                name = f"{count} x {shape[0]}x{shape[1]}"
                row = Row(name, kind, side, 1e3 * seconds, evaluations, residual)
                if side == "ours":
                    row.peak_units = peak_bytes(sides[side].step) / (4 * shape[0] * shape[1])
                rows.append(row)
                print(
                    f"{row.units:>16}  {kind:<16}{side:<18}{row.milliseconds:>12.1f} ms"
                    f"  evaluations {evaluations:5.2f}  |f| {residual:.1e}"
                    + ("" if row.peak_units is None else f"  peak {row.peak_units:.2f} units"),
                    flush=True,
                )
    return rows


def summary(rows: list[Row]) -> dict[str, float]:
    """Ratios over the whole layer and per shape."""

    def total(kind: str, side: str, units: str | None = None) -> float:
        chosen = [
            r.milliseconds
            for r in rows
            if (r.kind, r.side) == (kind, side) and units in (None, r.units)
        ]
        return sum(chosen) if chosen else float("nan")

    ratios = {}
    for kind in KINDS:
        ratios[f"{kind}: slow reference / ours"] = total(kind, "slow reference") / total(
            kind, "ours"
        )
    for kind in KINDS[1:]:
        ratios[f"{kind} / muon, ours"] = total(kind, "ours") / total("muon", "ours")
    for units in dict.fromkeys(r.units for r in rows):
        ratios[f"{units}: torch.optim.Muon / our Muon"] = total(
            "muon", "torch.optim.Muon", units
        ) / total("muon", "ours", units)
        ratios[f"{units}: SSO / Muon, ours"] = total("spectral_sphere", "ours", units) / total(
            "muon", "ours", units
        )
    return {k: v for k, v in ratios.items() if v == v}


def processor() -> str:
    """The processor's name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [x.split(":")[1].strip() for x in lines if x.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layer", choices=LAYERS, default="dense-1.7b")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-reference", action="store_true", help="leave out the slow reference")
    parser.add_argument("--quick", action="store_true", help="small units; ends in seconds")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    layer = "quick" if arguments.quick else arguments.layer
    torch.set_num_threads(arguments.threads)
    machine = {
        "processor": processor(),
        "threads": str(arguments.threads),
        "clock": "process time",
        "torch": torch.__version__,
        "layer": layer,
        "dtype": arguments.dtype,
    }
    print(", ".join(f"{k} {v}" for k, v in machine.items()))
    rows = measure(layer, arguments.dtype, arguments.repeats, not arguments.no_reference)
    ratios = summary(rows)
    for name, value in ratios.items():
        print(f"{name:<52}{value:8.2f}")
    if arguments.json:
        figures = {"machine": machine, "ratios": ratios, "rows": [asdict(r) for r in rows]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
