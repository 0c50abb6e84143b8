"""Measure a step of every optimizer on whole models, and its share of training.

    python scripts/bench/optimizer.py --tokens-per-second 60000
    python scripts/bench/optimizer.py --train-json train.json --graph --json result.json
    python scripts/bench/optimizer.py --small

For each recipe it takes the model's units with the recipe's sizes and settings: the step of all of
them on one rank, and of the fullest rank's share of `--ranks` ranks, the matrices of each shape
dealt evenly (126 of the 1008 of Dense-1.7B to each of 8 ranks). A step is rules, masters and
bfloat16 weights, and with PC layers their gradients and effective weights; the reduction of
gradients, exchange and gathers are not in it (scripts/bench/distributed.py counts their bytes). Our
rules are compared with torch.optim.AdamW (fused), torch.optim.Muon with it, and the slow reference
in slow_reference.py, which takes one matrix after the other, so that one of each shape is timed.
`--public-sso` adds the SSO that was published with its paper, from a checkout, at our settings.

Times are medians of `--repeats` steps: on a GPU by events, with the time that the host took to
launch beside them, on a CPU processor time. Shares are of a training step of `--batch-tokens`
tokens over the ranks, at the tokens per second and GPU that scripts/bench/train.py measured;
without that number there are none. On a GPU every step of ours also runs with synchronisation
forbidden. Two more tables are of the matrices of each shape, at most 32 of them: the forms of
msign, and all matrices in one batch beside one after the other; and the step of our Muon beside
that of torch.optim.Muon.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from models.engine import import_quietly

import_quietly()

from models.pc_config import PCConfig
from models.units import Unit
from parallel.optimizer.cost import assigned_cost
from parallel.optimizer.routing import Assign
from scripts.bench.optimizer_sides import (
    Ours,
    PublicSSO,
    Share,
    Side,
    Torch,
    aligned,
    matrices,
    slow_milliseconds,
)
from scripts.bench.record import record, write_json
from scripts.bench.timing import milliseconds, timed
from scripts.command import add_json, command
from spectral import kernels
from spectral.cuda_graph import WARM_UP, CapturedCall
from spectral.kernels import library
from spectral.polar import msign
from training.build import config_assignments, config_units
from training.config import Config, load_config
from training.config.paper_choices import with_paper_choices
from training.errors import InputError
from training.report.table import table

RECIPES = tuple(ROOT / f"configs/{name}.yaml" for name in ("llama1b_sso", "qwen3_1.7b_sso"))
RULES = ("adamw", "muon", "muon_sphere", "spectral_sphere", "muon_plus_plus")
SLOW = ("muon", "muon_sphere", "spectral_sphere")
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
"""The most matrices of a shape in the tables by shape."""


@dataclasses.dataclass
class Row:
    """One side's step.

    `host_ms` is what the host needs to launch it, `percent` its share of the training step, and
    `over_muon` that of what it costs more than our Muon; None where unknown or meaningless.
    """

    ranks: int
    side: str
    rule: str
    pc: bool
    ms: float
    host_ms: float | None = None
    waits_for_device: bool | None = None
    percent: float | None = None
    over_muon: float | None = None


class Clock:
    """Times steps on one device."""

    def __init__(self, device: torch.device, repeats: int, graph: bool) -> None:
        self.device, self.repeats, self.graph = device, repeats, graph

    def side(self, side: Side, *, graph: bool) -> tuple[float, float | None]:
        """Median milliseconds of a side's step, and those that the host took."""
        step: Callable[[], object] = side.step
        captured = CapturedCall(side.step, self.device) if graph and self.graph else None
        if captured is not None:
            step = captured
        for _ in range(1 if captured is None else WARM_UP + 1):
            side.prepare()
            step()
        times = []
        for _ in range(self.repeats):
            side.prepare()
            times.append(timed(step, self.device, torch.cuda.synchronize))
        if captured is not None:
            captured.release()
        host = [host for _, host in times]
        known = self.device.type == "cuda"
        return statistics.median(ms for ms, _ in times), statistics.median(host) if known else None

    def call(self, call: Callable[[], object]) -> float:
        """Median milliseconds of a call."""
        return milliseconds(call, self.device, self.repeats)

    def waits(self, side: Side) -> bool | None:
        """Whether a step makes the host wait for the device; None on a CPU."""
        if self.device.type != "cuda":
            return None
        side.prepare()
        torch.cuda.set_sync_debug_mode("error")
        try:
            side.step()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return True
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return False


def with_rule(config: Config, rule: str, pc: bool) -> Config:
    """The recipe with its matrices under `rule`, with the msign of the recipe's own rule.

    With `pc` it has its PC layers, or the default ones, else none. Raises InputError for a rule
    that cannot take that msign.
    """
    section = (config.pc or PCConfig()) if pc else None
    optimizer = config.optimizer
    own, other = optimizer.rule(optimizer.matrix.rule), optimizer.rule(rule)
    shared = {name: getattr(own, name) for name in MSIGN if hasattr(other, name)}
    try:
        found = dataclasses.replace(other, **shared)
    except ValueError as error:
        kind = optimizer.matrix.rule
        raise InputError(f"rule {rule} cannot take the msign of rule {kind}: {error}") from None
    rules = dataclasses.replace(optimizer.rules, **{rule: found})  # type: ignore[type-var]
    matrix = dataclasses.replace(optimizer.matrix, rule=rule)
    optimizer = dataclasses.replace(optimizer, matrix=matrix, rules=rules)
    return with_paper_choices(dataclasses.replace(config, optimizer=optimizer, pc=section))


def matrices_of_shape(units: Sequence[Unit], assign: Assign) -> dict[tuple[int, ...], list[Unit]]:
    """The units of each shape that the recipe assigns to a whole-matrix rule."""
    found: dict[tuple[int, ...], list[Unit]] = {}
    for unit in matrices(units, assign):
        found.setdefault(unit.shape, []).append(unit)
    return found


def fullest_share(units: Sequence[Unit], assign: Assign, ranks: int) -> Share:
    """The share of the rank with the largest load.

    Matrices of each shape are dealt evenly, the most expensive shape first, and a remainder goes to
    the least loaded ranks.
    """
    of_shape = matrices_of_shape(units, assign)
    costs = {shape: assigned_cost(shape, assign(each[0])) for shape, each in of_shape.items()}
    loads = [0.0] * ranks
    shares: list[list[Unit]] = [[] for _ in range(ranks)]
    for shape in sorted(of_shape, key=lambda shape: -costs[shape]):
        order = sorted(range(ranks), key=lambda rank: loads[rank])
        for i, unit in enumerate(of_shape[shape]):
            shares[order[i % ranks]].append(unit)
            loads[order[i % ranks]] += costs[shape]
    elementwise = [unit for unit in units if not assign(unit).has_owner]
    return Share(shares[loads.index(max(loads))], elementwise, ranks)


def measure(
    config: Config, clock: Clock, ranks: int, rules: Sequence[str], public_sso: Path | None
) -> list[Row]:
    """A row per side for one of `ranks` ranks."""
    device, rows = clock.device, []
    share = fullest_share(config_units(config), config_assignments(config), ranks)
    for rule in rules:
        for pc in (False, True):
            assign = config_assignments(with_rule(config, rule, pc))
            side = Ours(share, assign, device)
            ms, host = clock.side(side, graph=True)
            rows.append(Row(ranks, "ours", rule, pc, ms, host, clock.waits(side)))
            del side
    for rule in ("adamw", "muon"):
        other = Torch(share, device, muon=rule == "muon")
        ms, host = clock.side(other, graph=False)
        rows.append(Row(ranks, "torch.optim", rule, False, ms, host))
        del other
    if public_sso is not None:
        public = PublicSSO(share, device, public_sso)
        ms, host = clock.side(public, graph=False)
        rows.append(Row(ranks, "public", "spectral_sphere", False, ms, host, clock.waits(public)))
        del public
    rest = dataclasses.replace(share, matrices=[])
    for rule in SLOW:
        elementwise, _ = clock.side(Ours(rest, config_assignments(config), device), graph=False)
        one = slow_milliseconds(rule, share.matrices, device, lambda step: timed(step, device)[0])
        rows.append(Row(ranks, "slow reference", rule, False, elementwise + one))
    return rows


def in_training(rows: Sequence[Row], tokens_per_second: float, batch_tokens: int) -> None:
    """Fill in the shares of the training step."""
    muon = {r.ranks: r.ms for r in rows if (r.side, r.rule, r.pc) == ("ours", "muon", False)}
    for row in rows:
        step_ms = 1e3 * batch_tokens / (row.ranks * tokens_per_second)
        row.percent = 100 * row.ms / step_ms
        if row.side == "ours" and row.ranks in muon:
            row.over_muon = 100 * (row.ms - muon[row.ranks]) / step_ms


def forms(units: Sequence[Unit], assign: Assign, clock: Clock) -> list[dict[str, Any]]:
    """Milliseconds of msign (float16, 5 steps) of the model's matrices of each shape.

    In one batch with all products by the library, in one batch as the kernels' table says, and one
    matrix after the other.
    """
    found = []
    of_library = {name: getattr(library, name) for name in ("gram", "commuting", "polynomial")}
    orthogonal = partial(msign, steps=5, dtype=torch.float16)
    for shape, each in matrices_of_shape(units, assign).items():
        _, x = aligned(len(each[:MOST_UNITS]), shape, clock.device)
        row: dict[str, Any] = {"units": _named(len(x), shape)}
        with patch.multiple(kernels, **of_library):
            row["one batch, library"] = clock.call(partial(orthogonal, x))
        row["one batch, by the table"] = clock.call(partial(orthogonal, x))
        row["one by one"] = clock.call(partial(_in_turn, [partial(orthogonal, m) for m in x]))
        found.append(row)
    return found


def muon_by_shape(config: Config, clock: Clock) -> list[dict[str, Any]]:
    """Milliseconds of a step of our Muon and of torch.optim.Muon on the matrices of each shape.

    Both take as many steps of msign as in the other tables, ours in the recipe's dtype.
    """
    assign, found = config_assignments(with_rule(config, "muon", pc=False)), []
    for shape, each in matrices_of_shape(config_units(config), assign).items():
        share = Share(each[:MOST_UNITS], [], 1)
        ours, _ = clock.side(Ours(share, assign, clock.device), graph=True)
        other, _ = clock.side(Torch(share, clock.device, muon=True), graph=False)
        units = _named(len(share.matrices), shape)
        found.append({"units": units, "ours": ours, "torch.optim": other, "ratio": ours / other})
    return found


def _named(count: int, shape: tuple[int, ...]) -> str:
    return f"{count} x {shape[0]}x{shape[1]}"


def _in_turn(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def report(rows: Sequence[Row]) -> str:
    """The table of the rows."""

    def text(value: float | None, digits: int = 2) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    header = ("ranks", "side", "rule", "PC", "ms", "host ms", "% of step", "over Muon", "waits")
    lines = [
        (
            str(row.ranks), row.side, row.rule, "yes" if row.pc else "", text(row.ms),
            text(row.host_ms), text(row.percent), text(row.over_muon),
            {None: "", True: "YES", False: "no"}[row.waits_for_device],
        )
        for row in rows
    ]  # fmt: skip
    return table(header, lines)


def verdicts(rows: Sequence[Row]) -> list[str]:
    """A sentence per target that could be measured."""
    found = []
    for row in rows:
        if row.ranks == 1 or row.pc or row.rule not in TARGETS or row.over_muon is None:
            continue
        target = TARGETS[row.rule]
        found.append(
            f"{row.rule} on a rank of {row.ranks}: {row.over_muon:.2f}% of the step over Muon, "
            f"target at most {target}%: {'met' if row.over_muon <= target else 'missed'}"
        )
    return found


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
    parser.add_argument(
        "--public-sso", type=Path, metavar="FOLDER",
        help="compare with SpectralBall of the package emerging_optimizers in that folder, from "
        "Unakar/Megatron-LM (branch spectral_ball)",
    )  # fmt: skip
    parser.add_argument("--small", action="store_true", help="use tiny layers; ends in seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_json(parser)
    return parser.parse_intermixed_args(arguments)


def speed(options: argparse.Namespace) -> float | None:
    """Tokens per second and GPU in training, None if unknown."""
    if options.train_json is None:
        found: float | None = options.tokens_per_second
        return found
    measured = json.loads(options.train_json.read_text())
    return float(measured.get("tokens_per_second_per_device", measured["tokens_per_second"]))


def measure_recipe(
    config: Config, options: argparse.Namespace, clock: Clock, tokens_per_second: float | None
) -> dict[str, Any]:
    """Measure and print one recipe."""
    rows: list[Row] = []
    for ranks in options.ranks:
        rows += measure(config, clock, ranks, options.rules, options.public_sso)
    if tokens_per_second is not None:
        in_training(rows, tokens_per_second, options.batch_tokens)
    units, assign = config_units(config), config_assignments(config)
    by_form, by_shape = forms(units, assign, clock), muon_by_shape(config, clock)
    print(f"{config.run.name}, {len(matrices(units, assign))} matrices\n\n{report(rows)}\n")
    if clock.device.type == "cuda" and not options.small:  # elsewhere they would say nothing
        print("\n".join([*verdicts(rows), ""]))
    for found in (by_form, by_shape):
        print(table(tuple(found[0]), [tuple(map(rounded, row.values())) for row in found]) + "\n")
    return {
        "rows": [dataclasses.asdict(row) for row in rows],
        "forms": by_form,
        "by_shape": by_shape,
    }


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
    if options.public_sso is not None and not (options.public_sso / "emerging_optimizers").is_dir():
        raise InputError(
            f"--public-sso must name a folder with emerging_optimizers, got {options.public_sso}"
        )
    clock, tokens_per_second = Clock(device, options.repeats, options.graph), speed(options)
    models: dict[str, Any] = {}
    for path in options.config or RECIPES:
        small = [*SMALL, "model.vocab_size=256"] if options.small else ["model.vocab_size=100352"]
        config = load_config(path, [*small, *options.overrides])
        models[config.run.name] = measure_recipe(config, options, clock, tokens_per_second)
    figures = {"tokens_per_second": tokens_per_second, "models": models}
    write_json(options.json, record("scripts/bench/optimizer.py", arguments, device, figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
