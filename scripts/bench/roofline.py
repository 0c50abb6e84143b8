"""Model the step of every optimizer on a pretended GPU: launches, bytes, FLOPs, milliseconds.

    python scripts/bench/roofline.py --ranks 8 --rules adamw muon
    python scripts/bench/roofline.py --ranks 1 8 64 --ablate \
        --peer dion=/path/to/dion --peer public_sso=/path/to/Megatron-LM

Needs no GPU, but a C++ compiler once, as rehearsals do (docs/rehearsal.md), whose counter and whose
constants it uses. A launch takes the longest of its bytes, its FLOPs and the least time of a
launch; nothing runs beside anything else. It is a model: take ratios from it, not times.

The first table is one rank's whole step in a real run, by part: clip, momentum, exchange, solver
(krylov), products, power iteration, update, elementwise rules, gather of the new weights. The
second takes the matrices of the fullest of `--ranks` ranks, without exchange and gather, and
compares our rules with torch.optim and with other projects' optimizers (`--peer NAME=PATH`, a
checkout), all traced by the same counter in the same run. Kernels that a peer writes itself are not
used. Where a peer's loops depend on values, as those of the public SSO do, the model takes the
branches of made-up values; its row is no measurement of how often it evaluates.

`--ablate` adds whole steps of ours with one thing taken away at a time: the batching of matrices,
the joining of shapes and of step groups, the symmetric kernels, those of small problems, the cached
singular vectors, and the host's launches, which a CUDA graph replaces. What changes nothing, as the
symmetric kernels in float32, is left out. Streams cannot be taken away from a model in which
nothing runs beside anything else.

Last come the goals for the llama1b recipes on 8 ranks, as far as the run has their rows.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from models.engine import import_quietly

import_quietly()

from parallel.plan.devices import Device, device_named
from scripts.bench.optimizer import RULES, SMALL, with_rule
from scripts.bench.record import record, write_json
from scripts.bench.roofline_sides import ABLATIONS, HERE, PEERS
from scripts.command import add_json, command
from training.build import on_mock_tokens
from training.config import Config, check, load_config
from training.errors import InputError
from training.rehearsal.counts import Counts
from training.rehearsal.job import Job, TracedCall
from training.rehearsal.parts import PARTS
from training.rehearsal.processes import Processes
from training.rehearsal.rank import RankReport
from training.rehearsal.scenario import PLAIN_STEP
from training.rehearsal.trace import OPTIMIZER
from training.report.table import table

RECIPE = ROOT / "configs/llama1b_sso.yaml"


@dataclasses.dataclass
class Row:
    """One step. `error` says why there is none.

    `side` is ours or whose optimizer it is, `scope` the whole step of a run or that of the matrices
    and elementwise weights of one rank, `without` what was taken away.
    """

    ranks: int
    side: str
    rule: str
    pc: bool
    scope: str
    without: str = ""
    launches: int = 0
    moved_bytes: float = 0.0
    flops: float = 0.0
    milliseconds: float = 0.0
    host_reads: int = 0
    parts: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    error: str | None = None


def counted(row: Row, report: RankReport, step: int) -> Row:
    """Fill in what a rehearsal found of a step."""
    if report.error is not None:
        return dataclasses.replace(row, error=report.error)
    counts: Counts = report.counts[step, OPTIMIZER]
    parts = {name: dataclasses.asdict(counts.parts[name]) for name in PARTS if name in counts.parts}
    return dataclasses.replace(
        row,
        launches=counts.launches,
        moved_bytes=sum(part.moved_bytes for part in counts.parts.values()),
        flops=sum(part.flops for part in counts.parts.values()),
        milliseconds=1e3 * counts.modelled_seconds,
        host_reads=counts.host_reads.total(),
        parts=parts,
    )


def rehearsable(config: Config, ranks: int) -> Config:
    """Return the config on made tokens, with a batch that `ranks` ranks can share.

    Raises InvalidConfigError for a layout that cannot be.
    """
    each = config.train.micro_batch * ranks
    train = dataclasses.replace(
        config.train, global_batch=-(-config.train.global_batch // each) * each
    )
    found = on_mock_tokens(dataclasses.replace(config, train=train))
    check(found, ranks)
    return found


def plans(
    config: Config, options: argparse.Namespace, device: Device
) -> Iterator[tuple[Row, Job | TracedCall, int]]:
    """Yield what is to be traced: the row, how, and the number of the step that counts."""
    for ranks in options.ranks:
        for rule in options.rules:
            for pc in options.pc:
                mine = rehearsable(with_rule(config, rule, pc), ranks)
                row = Row(ranks, "ours", rule, pc, "step")
                yield row, Job(mine, ranks, 0, device), PLAIN_STEP
                for name, ablation in ABLATIONS.items() if options.ablate else ():
                    if rule in ablation.rules:
                        less = ablation.changed(mine, rule)
                        job = Job(less, ranks, 0, device, before=ablation.before)
                        yield dataclasses.replace(row, without=name), job, ablation.step
                call = TracedCall(f"{HERE}:trace_ours", (config, ranks, rule, pc), device)
                yield dataclasses.replace(row, scope="share"), call, 0
        for rule in ("adamw", "muon"):
            call = TracedCall(f"{HERE}:trace_torch", (config, ranks, rule), device)
            yield Row(ranks, "torch.optim", rule, False, "share"), call, 0
        for name, path in options.peer:
            call = TracedCall(f"{HERE}:trace_peer", (config, ranks, name, path), device)
            yield Row(ranks, name, "", False, "share"), call, 0


GOALS: Final[tuple[tuple[str, str | None, float], ...]] = (
    ("adamw", None, 60),
    ("muon", None, 300),
    ("muon_sphere", None, 400),
    ("spectral_sphere", None, 900),
    ("muon_sphere", "muon", 1.1),
    ("spectral_sphere", "muon", 2.0),
)
"""What a whole step of a 1B Llama on 8 ranks should take: launches, or, of two rules, the ratio of
modelled times."""


def goals(rows: Sequence[Row]) -> str:
    """The goals that the rows have figures for, now and then."""
    whole = {
        row.rule: row
        for row in rows
        if row.scope == "step" and row.ranks == 8 and not (row.pc or row.without or row.error)
    }
    cells = []
    for rule, other, goal in GOALS:
        if rule in whole and other is None:
            cells.append((f"launches, {rule}", f"{whole[rule].launches:,}", f"{goal:,}"))
        elif rule in whole and other in whole:
            ratio = whole[rule].milliseconds / whole[other].milliseconds
            cells.append((f"modelled time, {rule} / {other}", f"{ratio:.2f}", f"{goal}"))
    return table(("8 ranks", "now", "goal"), cells)


def changes_nothing(row: Row, rows: Sequence[Row]) -> bool:
    """Return whether what a row leaves out is not used in the whole step, which is among `rows`."""
    same = ("ranks", "side", "rule", "pc", "scope", "launches", "moved_bytes", "flops")
    return bool(row.without) and any(
        not other.without and all(getattr(row, name) == getattr(other, name) for name in same)
        for other in rows
    )


def tabled(rows: Sequence[Row]) -> str:
    """The rows for people, with the modelled milliseconds of each part."""
    parts = [name for name in PARTS if any(name in row.parts for row in rows)]
    header = ("ranks", "side", "rule", "PC", "without", "launches", "GB", "TFLOP", "ms", *parts)
    return table(header, [_cells(row, parts) for row in rows])


def _cells(row: Row, parts: Sequence[str]) -> tuple[str, ...]:
    names = (str(row.ranks), row.side, row.rule, "yes" if row.pc else "", row.without)
    if row.error is not None:
        return (*names, "failed", *("" for _ in range(3 + len(parts))))
    figures = f"{row.launches:,}", f"{row.moved_bytes / 1e9:.3g}", f"{row.flops / 1e12:.3g}"
    each = (
        f"{1e3 * row.parts[name]['seconds']:.2f} ({row.parts[name]['launches']:.0f})"
        if name in row.parts
        else ""
        for name in parts
    )
    return (*names, *figures, f"{row.milliseconds:.2f}", *each)


def peer(text: str) -> tuple[str, str]:
    """Read `NAME=PATH`."""
    name, _, path = text.partition("=")
    if name not in PEERS or not path:
        raise argparse.ArgumentTypeError(
            f"must be NAME=PATH with NAME one of {', '.join(PEERS)}, got {text!r}"
        )
    if not Path(path).is_dir():
        raise argparse.ArgumentTypeError(f"must name a folder, got {path!r}")
    return name, str(Path(path).resolve())


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=RECIPE, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument(
        "--pc", nargs="+", type=lambda text: text == "yes", default=[False, True],
        metavar="yes|no", help="with PC layers, without them, or both (default)",
    )  # fmt: skip
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--ablate", action="store_true", help="take away one thing at a time")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--small", action="store_true", help="use tiny layers")
    add_json(parser)
    return parser.parse_intermixed_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Trace, print and write the result."""
    options = parse(arguments)
    try:
        device = device_named(options.device)
    except ValueError as error:
        raise InputError(str(error)) from None
    small = [*SMALL, "model.vocab_size=256"] if options.small else []
    config = load_config(options.config, [*small, *options.overrides])
    rows: list[Row] = []
    planned = list(
        plans(config, options, device)
    )  # a wrong input is told before anything is traced
    with Processes() as processes:
        for row, job, step in planned:
            (report,) = processes.perform([job])
            found = counted(row, report, step)
            said = found.error or f"{found.launches:,} launches"
            name = f"{row.rule} without {row.without}" if row.without else row.rule
            print(f"{row.ranks} ranks, {row.side} {name}: {said}", file=sys.stderr, flush=True)
            if not changes_nothing(found, rows):
                rows.append(found)
    constants = ", ".join(f"{name} {value}" for name, value in device.constants().items())
    print(f"modelled for {constants}\n")
    for scope, title in (("step", "one rank's step"), ("share", "the same matrices")):
        some = [row for row in rows if row.scope == scope]
        print(f"{title}: modelled ms (launches) by part\n\n{tabled(some)}\n")
    print(f"goals for the 1B Llama\n\n{goals(rows)}\n")
    figures: dict[str, Any] = {
        "constants": device.constants(),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    where = torch.device("cpu")
    write_json(options.json, record("scripts/bench/roofline.py", arguments, where, figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
