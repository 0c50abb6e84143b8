"""Measure a step of every optimizer on whole models.

    python scripts/bench/optimizer.py --graph --json result.json
    python scripts/bench/optimizer.py --small

For each recipe it takes the model's units with the recipe's sizes and settings: the step of all of
them on one rank, and of the fullest rank's share of `--ranks` ranks. A step is rules, masters and
bfloat16 weights; the reduction of gradients, exchange and gathers are not in it
(scripts/bench/distributed.py has them), and neither are PC layers (scripts/bench/train.py). Our
rules are compared with torch.optim.AdamW (fused) and with torch.optim.Muon beside it, on float32
weights.

Sides take turns, and times are medians of `--repeats` steps: on a GPU by events, with the time that
the host took to launch beside them, on a CPU processor time. scripts/bench/library.py compares Muon
shape by shape.
"""

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from models.engine import import_engine

import_engine()

from models.units import Unit
from parallel.optimizer.routing import Assign, Assignment
from scripts.bench.measure import in_turn, print_table, record, timed, write_json
from scripts.command import add_json, command, whole_number
from spectral import CapturedStep, SpectralOptimizer
from spectral.sharded.placement import Work, place
from spectral.singular_triplets import cold_start
from training.build import config_assignments, config_units
from training.config import Config, load_config
from training.config.paper_choices import with_paper_choices
from training.errors import InputError

RECIPES = tuple(ROOT / f"configs/{name}.yaml" for name in ("llama1b_sso", "qwen3_1.7b_sso"))
RULES = ("adamw", "muon", "muon_sphere", "spectral_sphere", "muon_plus_plus")
MSIGN = ("schedule", "steps", "msign_dtype")
"""Fields that all rules of matrices have, and that decide most of what they cost."""
SMALL = (
    "model.layers=2", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.head_dim=16",
    "model.ffn=96",
)  # fmt: skip
WARM_UP = 3
"""Steps of a side before it is measured: a graph is recorded in the third."""
ALIGNMENT = 0.6
"""Times min(shape)^-1/2: the gradient's part along the weight's top singular pair Theta, with which
the solver meets |f(0)| = 0.5 as in training. Unaligned gradients flatter every solver."""

Step = Callable[[], object]


@dataclass(frozen=True)
class Share:
    """The units that one of `ranks` ranks steps: whole matrices, and a part of each elementwise
    unit."""

    matrices: list[Unit]
    elementwise: list[Unit]
    ranks: int

    def part(self, unit: Unit) -> int:
        """The rank's number of elements of an elementwise unit."""
        return -(-unit.numel // self.ranks)


def with_rule(config: Config, rule: str) -> Config:
    """The recipe without PC layers and with its matrices under `rule`, with the msign of its own.

    Raises InputError for a rule that cannot take that msign.
    """
    optimizer = config.optimizer
    own, other = optimizer.rule(optimizer.matrix.rule), optimizer.rule(rule)
    shared = {name: vars(own)[name] for name in MSIGN if {name} <= vars(own).keys() & vars(other)}
    try:
        chosen = replace(other, **shared)
    except ValueError as error:
        kind = optimizer.matrix.rule
        raise InputError(f"rule {rule} cannot take the msign of rule {kind}: {error}") from None
    rules = replace(optimizer.rules, **{rule: chosen})  # type: ignore[type-var]
    optimizer = replace(optimizer, matrix=replace(optimizer.matrix, rule=rule), rules=rules)
    return with_paper_choices(replace(config, optimizer=optimizer, pc=None))


def fullest_share(units: Sequence[Unit], assign: Assign, ranks: int) -> Share:
    """The share of the rank with the largest load, under the placement of a run."""
    matrices = [unit for unit in units if assign(unit).has_owner]
    works = [Work(u.name, assign(u).cost(u.shape), {0: u.numel}) for u in matrices]
    placed = place("auto", works, ranks)
    fullest = placed.loads.index(max(placed.loads))
    owned = [unit for unit in matrices if placed.owners[unit.name] == fullest]
    return Share(owned, [unit for unit in units if not assign(unit).has_owner], ranks)


def aligned(count: int, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Weights of spectral norm sqrt(rows / cols) and gradients, `[count, rows, cols]`, aligned as
    in training."""
    rows, cols = shape
    weight = torch.randn(count, rows, cols, device=device)
    sigma, u, v = cold_start(weight)
    weight *= (rows / cols) ** 0.5 / sigma[:, None, None]
    gradient = torch.randn_like(weight).div_((rows * cols) ** 0.5)
    gradient += ALIGNMENT / min(rows, cols) ** 0.5 * u[:, :, None] * v[:, None]
    return weight, gradient


def parameters(shapes: Iterable[tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> Any:
    """Parameters with gradients: matrices aligned as in training, vectors at random."""
    made = []
    for shape, count in Counter(shapes).items():
        if len(shape) == 2:
            weights, gradients = aligned(count, shape, device)
        else:
            weights, gradients = (torch.randn(count, *shape, device=device) for _ in range(2))
        for weight, gradient in zip(weights.to(dtype), gradients.to(dtype), strict=True):
            made.append(Parameter(weight))
            made[-1].grad = gradient
    return made


def our_step(share: Share, assign: Assign, device: torch.device, *, graph: bool) -> Step:
    """The step of our rules on bfloat16 weights with masters, as a CUDA graph if asked for;
    elementwise units of one assignment are one."""
    shapes: dict[Assignment, list[tuple[int, ...]]] = {}
    flat: Counter[Assignment] = Counter()
    for unit in share.matrices:
        if assign(unit).has_owner:
            shapes.setdefault(assign(unit), []).append(unit.shape)
        else:
            flat[assign(unit)] += unit.numel
    for unit in share.elementwise:
        flat[assign(unit)] += share.part(unit)
    for assigned, numel in flat.items():
        shapes.setdefault(assigned, []).append((numel,))
    groups = [
        {
            "params": parameters(own, device, torch.bfloat16),
            "rule": assigned.rule_name,
            "lr": torch.tensor(assigned.lr, device=device),
            "weight_decay": assigned.weight_decay,
            **asdict(assigned.rule),
        }
        for assigned, own in shapes.items()
    ]
    optimizer = SpectralOptimizer(groups, nonfinite="skip", master_weights=True)
    return CapturedStep(optimizer) if graph else optimizer.step


def torch_step(share: Share, device: torch.device, *, muon: int | None = None) -> Step:
    """The step of PyTorch's AdamW, or of its Muon with `muon` steps of msign on matrices."""
    rest = [(sum(map(share.part, share.elementwise)),)] if share.elementwise else []
    shapes = [unit.shape for unit in share.matrices]
    whole, flat = (parameters(each, device, torch.float32) for each in (shapes, rest))
    optimizers: list[torch.optim.Optimizer] = []
    if muon is not None:
        optimizers.append(torch.optim.Muon(whole, lr=5e-3, momentum=0.95, ns_steps=muon))
    if others := flat if muon is not None else [*whole, *flat]:
        optimizers.append(torch.optim.AdamW(others, lr=1e-3, fused=True))

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return step


def medians(
    steps: Mapping[str, Step], device: torch.device, repeats: int
) -> dict[str, tuple[float, float | None]]:
    """Median milliseconds of each step, and those that the host took, None on a CPU."""
    before = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    calls = {name: partial(timed, step, device, before) for name, step in steps.items()}
    found = {}
    for name, turns in in_turn(calls, repeats, WARM_UP).items():
        whole, host = (statistics.median(times) for times in zip(*turns, strict=True))
        found[name] = whole, host if device.type == "cuda" else None
    return found


def measure(config: Config, ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per side for one of `ranks` ranks."""
    device = torch.device(options.device)
    share = fullest_share(config_units(config), config_assignments(config), ranks)
    msign_steps = vars(config.optimizer.rule(config.optimizer.matrix.rule)).get("steps", 5)
    steps: dict[str, Step] = {
        rule: our_step(
            share, config_assignments(with_rule(config, rule)), device, graph=options.graph
        )
        for rule in options.rules
    }
    steps["torch.optim adamw"] = torch_step(share, device)
    steps["torch.optim muon"] = torch_step(share, device, muon=msign_steps)
    times = medians(steps, device, options.repeats)
    return [
        {"ranks": ranks, "optimizer": name, "ms": ms, "host ms": host}
        for name, (ms, host) in times.items()
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        help="a recipe; may be repeated (default: llama1b_sso and qwen3_1.7b_sso)",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values for all recipes")
    parser.add_argument(
        "--ranks", type=whole_number(), nargs="+", default=[1, 8], help="default: 1 8"
    )
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--repeats", type=whole_number(), default=10, help="steps (default: 10)")
    parser.add_argument("--graph", action="store_true", help="run our steps as CUDA graphs")
    parser.add_argument("--small", action="store_true", help="use tiny layers; ends in seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_json(parser)
    return parser.parse_intermixed_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the result."""
    options = parse(arguments)
    device = torch.device(options.device)
    if options.graph and device.type != "cuda":
        raise InputError(f"--graph needs CUDA, got device {device}")
    models: dict[str, Any] = {}
    for path in options.config or RECIPES:
        small = [*SMALL, "model.vocab_size=256"] if options.small else ["model.vocab_size=100352"]
        config = load_config(path, [*small, *options.overrides])
        rows = [row for ranks in options.ranks for row in measure(config, ranks, options)]
        print(config.run.name)
        print_table(rows)
        models[config.run.name] = rows
    content = record("scripts/bench/optimizer.py", arguments, device, {"models": models})
    write_json(options.json, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
