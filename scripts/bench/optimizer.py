"""Measure a step of every optimizer on whole models, and its share of training.

    python scripts/bench/optimizer.py --tokens-per-second 60000
    python scripts/bench/optimizer.py --train-json train.json --graph --json result.json
    python scripts/bench/optimizer.py --small

For each recipe it takes the model's units with the recipe's sizes and settings: the step of all of
them on one rank, and of the fullest rank's share of `--ranks` ranks, the matrices of each shape
dealt evenly (126 of the 1008 of Dense-1.7B to each of 8 ranks). A step is rules, masters and
bfloat16 weights; the reduction of gradients, exchange and gathers are not in it
(scripts/bench/distributed.py has them), and neither are PC layers (scripts/bench/train.py). Our
rules are compared with torch.optim.AdamW (fused) and with torch.optim.Muon beside it, on float32
weights.

Sides take turns, and times are medians of `--repeats` steps: on a GPU by events, with the time that
the host took to launch beside them, on a CPU processor time. Shares are of a training step of
`--batch-tokens` tokens over the ranks, at the tokens per second and GPU that scripts/bench/train.py
measured; without that number there are none. On a GPU every step of ours also runs with
synchronisation forbidden. A last table has the step of our Muon beside that of torch.optim.Muon, by
shape, of at most 32 matrices.
"""

import argparse
import json
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

from models.engine import import_quietly

import_quietly()

from models.units import Unit
from parallel.optimizer.routing import Assign, Assignment
from scripts.bench.measure import in_turn, record, timed, write_json
from scripts.command import add_json, command
from spectral import CapturedStep, SpectralOptimizer
from spectral.power_iteration import cold_start
from training.build import config_assignments, config_units
from training.config import Config, load_config
from training.config.paper_choices import with_paper_choices
from training.errors import InputError
from training.report.table import table

RECIPES = tuple(ROOT / f"configs/{name}.yaml" for name in ("llama1b_sso", "qwen3_1.7b_sso"))
RULES = ("adamw", "muon", "muon_sphere", "spectral_sphere", "muon_plus_plus")
MSIGN = ("schedule", "steps", "msign_dtype")
"""Fields that all rules of matrices have, and that decide most of what they cost."""
SMALL = (
    "model.layers=2", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.head_dim=16",
    "model.ffn=96",
)  # fmt: skip
TARGETS = {"spectral_sphere": 3.0, "muon_sphere": 0.5}
"""The most that a rule may cost beyond Muon, in percent of the training step."""
BATCH_TOKENS = 2**22
MOST_UNITS = 32
"""The most matrices of a shape in the table by shape."""
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


@dataclass
class Row:
    """One side's step.

    `host_ms` is what the host needs to launch it, `percent` its share of the training step, and
    `over_muon` that of what it costs more than our Muon; None where unknown or meaningless.
    """

    ranks: int
    side: str
    rule: str
    ms: float
    host_ms: float | None = None
    waits_for_device: bool | None = None
    percent: float | None = None
    over_muon: float | None = None


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


def matrices_of_shape(units: Sequence[Unit], assign: Assign) -> dict[tuple[int, ...], list[Unit]]:
    """The units of each shape that the recipe assigns to a whole-matrix rule."""
    by_shape: dict[tuple[int, ...], list[Unit]] = {}
    for unit in units:
        if assign(unit).has_owner:
            by_shape.setdefault(unit.shape, []).append(unit)
    return by_shape


def fullest_share(units: Sequence[Unit], assign: Assign, ranks: int) -> Share:
    """The share of the rank with the largest load.

    Matrices of each shape are dealt evenly, the most expensive shape first, and a remainder goes to
    the least loaded ranks.
    """
    by_shape = matrices_of_shape(units, assign)
    costs = {shape: assign(same[0]).cost(shape) for shape, same in by_shape.items()}
    loads = [0.0] * ranks
    shares: list[list[Unit]] = [[] for _ in range(ranks)]
    for shape in sorted(by_shape, key=lambda shape: -costs[shape]):
        order = sorted(range(ranks), key=lambda rank: loads[rank])
        for i, unit in enumerate(by_shape[shape]):
            shares[order[i % ranks]].append(unit)
            loads[order[i % ranks]] += costs[shape]
    elementwise = [unit for unit in units if not assign(unit).has_owner]
    return Share(shares[loads.index(max(loads))], elementwise, ranks)


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


def our_optimizer(share: Share, assign: Assign, device: torch.device) -> SpectralOptimizer:
    """Our rules on bfloat16 weights with masters; elementwise units of one assignment are one."""
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
    return SpectralOptimizer(groups, nonfinite="skip", master_weights=True)


def our_step(share: Share, assign: Assign, device: torch.device, *, graph: bool) -> Step:
    """The step of our rules, as a CUDA graph if asked for."""
    optimizer = our_optimizer(share, assign, device)
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


def waits(step: Step, device: torch.device) -> bool | None:
    """Whether a step makes the host wait for the device; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


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


def measure(config: Config, ranks: int, options: argparse.Namespace) -> list[Row]:
    """A row per side for one of `ranks` ranks."""
    device = torch.device(options.device)
    share = fullest_share(config_units(config), config_assignments(config), ranks)
    msign_steps = vars(config.optimizer.rule(config.optimizer.matrix.rule)).get("steps", 5)
    steps: dict[tuple[str, str], Step] = {
        ("ours", rule): our_step(
            share, config_assignments(with_rule(config, rule)), device, graph=options.graph
        )
        for rule in options.rules
    }
    steps["torch.optim", "adamw"] = torch_step(share, device)
    steps["torch.optim", "muon"] = torch_step(share, device, muon=msign_steps)
    named = {" ".join(key): step for key, step in steps.items()}
    times = medians(named, device, options.repeats)
    return [
        Row(
            ranks,
            side,
            rule,
            *times[f"{side} {rule}"],
            waits(step, device) if side == "ours" and not options.graph else None,
        )
        for (side, rule), step in steps.items()
    ]


def in_training(rows: Sequence[Row], tokens_per_second: float, batch_tokens: int) -> None:
    """Fill in the shares of the training step."""
    muon = {r.ranks: r.ms for r in rows if (r.side, r.rule) == ("ours", "muon")}
    for row in rows:
        step_ms = 1e3 * batch_tokens / (row.ranks * tokens_per_second)
        row.percent = 100 * row.ms / step_ms
        if row.side == "ours" and row.ranks in muon:
            row.over_muon = 100 * (row.ms - muon[row.ranks]) / step_ms


def muon_by_shape(config: Config, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a step of our Muon and of torch.optim.Muon on the matrices of each shape.

    Both take as many steps of msign as in the other table, ours in the recipe's dtype.
    """
    device, chosen = torch.device(options.device), with_rule(config, "muon")
    assign, steps = config_assignments(chosen), vars(chosen.optimizer.rule("muon"))["steps"]
    rows = []
    for shape, units in matrices_of_shape(config_units(config), assign).items():
        share = Share(units[:MOST_UNITS], [], 1)
        sides = {
            "ours": our_step(share, assign, device, graph=options.graph),
            "torch.optim": torch_step(share, device, muon=steps),
        }
        times = {name: ms for name, (ms, _) in medians(sides, device, options.repeats).items()}
        named = f"{len(share.matrices)} x {shape[0]}x{shape[1]}"
        rows.append({"units": named, **times, "ratio": times["ours"] / times["torch.optim"]})
    return rows


def report(rows: Sequence[Row]) -> str:
    """The table of the rows."""

    def text(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    header = ("ranks", "side", "rule", "ms", "host ms", "% of step", "over Muon", "waits")
    lines = [
        (
            str(row.ranks), row.side, row.rule, text(row.ms), text(row.host_ms), text(row.percent),
            text(row.over_muon), {None: "", True: "YES", False: "no"}[row.waits_for_device],
        )
        for row in rows
    ]  # fmt: skip
    return table(header, lines)


def verdicts(rows: Sequence[Row]) -> list[str]:
    """A sentence per target that could be measured."""
    sentences = []
    for row in rows:
        if row.ranks == 1 or row.rule not in TARGETS or row.over_muon is None:
            continue
        target = TARGETS[row.rule]
        sentences.append(
            f"{row.rule} on a rank of {row.ranks}: {row.over_muon:.2f}% of the step over Muon, "
            f"target at most {target}%: {'met' if row.over_muon <= target else 'missed'}"
        )
    return sentences


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        metavar="FILE",
        help="a recipe; may be repeated (default: llama1b_sso and qwen3_1.7b_sso)",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values for all recipes")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8], help="default: 1 8")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--repeats", type=int, default=10, help="steps to measure (default: 10)")
    parser.add_argument("--tokens-per-second", type=float, help="of training, per GPU")
    parser.add_argument(
        "--train-json", type=Path, metavar="FILE", help="take that from scripts/bench/train.py"
    )
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS)
    parser.add_argument("--graph", action="store_true", help="run our steps as CUDA graphs")
    parser.add_argument("--small", action="store_true", help="use tiny layers; ends in seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_json(parser)
    return parser.parse_intermixed_args(arguments)


def speed(options: argparse.Namespace) -> float | None:
    """Tokens per second and GPU in training, None if unknown."""
    if options.train_json is None:
        given: float | None = options.tokens_per_second
        return given
    measured = json.loads(options.train_json.read_text())
    return float(measured.get("tokens_per_second_per_device", measured["tokens_per_second"]))


def measure_recipe(
    config: Config, options: argparse.Namespace, tokens_per_second: float | None
) -> dict[str, Any]:
    """Measure and print one recipe."""
    rows = [row for ranks in options.ranks for row in measure(config, ranks, options)]
    if tokens_per_second is not None:
        in_training(rows, tokens_per_second, options.batch_tokens)
    by_shape = muon_by_shape(config, options)
    print(f"{config.run.name}\n\n{report(rows)}\n")
    if options.device != "cpu" and not options.small:  # elsewhere they would say nothing
        print("\n".join([*verdicts(rows), ""]))
    cells = [tuple(map(rounded, row.values())) for row in by_shape]
    print(table(tuple(by_shape[0]), cells) + "\n")
    return {"rows": [asdict(row) for row in rows], "by_shape": by_shape}


def rounded(value: object) -> str:
    """A cell of a table."""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the result."""
    options = parse(arguments)
    device = torch.device(options.device)
    if options.graph and device.type != "cuda":
        raise InputError(f"--graph needs CUDA, got device {device}")
    tokens_per_second = speed(options)
    models: dict[str, Any] = {}
    for path in options.config or RECIPES:
        small = [*SMALL, "model.vocab_size=256"] if options.small else ["model.vocab_size=100352"]
        config = load_config(path, [*small, *options.overrides])
        models[config.run.name] = measure_recipe(config, options, tokens_per_second)
    figures = {"tokens_per_second": tokens_per_second, "models": models}
    write_json(options.json, record("scripts/bench/optimizer.py", arguments, device, figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
