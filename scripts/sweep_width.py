"""Sweeps the learning rate at several widths, to see whether the best one stays the same.

    python scripts/sweep_width.py studies/widths/tiny.yaml runs/widths/tiny --jobs 2

A sweep is a YAML file: `title`, `seeds`, `widths`, `base_width`, `head_dim`, `ffn_ratio`,
`overrides` of every run, and `optimizers` by name, each with a `config`, the peak `rates` of its
matrices, its own `overrides`, and `rate_scaling`. A model of another width has more heads of the
same size and a feed-forward block of `ffn_ratio` times the width. Spectral rules scale each
matrix's update and radius by its shape (spectral muP), so that the same rate is asked for at every
width. AdamW's is as it is, or with `rate_scaling: mup` the rate times base_width / width, what muP
asks of matrices. The head, AdamW's under every rule, has its rate and its initial size scaled so in
all runs.

Each run is a process of one thread, or as `--nproc` and `--gpus-per-run` say, `--jobs` of them at a
time. One that has ended is not repeated, so the same command goes on with an interrupted sweep,
shares the work with others like it (docs/studies.md), and with more rates only these are run.
results.json and loss_against_rate.svg appear in the folder. The figure of a run is its last
validation loss; one that broke off, its loss no longer finite, has none.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.command import command
from scripts.studies.places import Place, add_places, places
from scripts.studies.records import RecordBook
from scripts.studies.search import last_of_each
from scripts.studies.trainer import Run, Trainer
from training.config import Config, InvalidConfigError, load_config
from training.config.binding import Binder
from training.config.files import read_merged
from training.errors import ConfigError
from training.report.table import table


@dataclass(frozen=True, kw_only=True)
class Swept:
    """One optimizer of a sweep."""

    config: str
    rates: list[float]
    overrides: list[str] = field(default_factory=list)
    rate_scaling: Literal["none", "mup"] = "none"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Optimizers, each at every width with each of its rates and every seed."""

    title: str
    seeds: list[int]
    widths: list[int]
    base_width: int
    head_dim: int
    ffn_ratio: float
    optimizers: dict[str, Swept]
    overrides: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Point:
    """One place of the grid. `losses` are of the seeds, nats per token, null for those that broke
    off; `loss` is their mean, null if one did."""

    optimizer: str
    width: int
    rate: float
    losses: list[float | None]
    loss: float | None


@dataclass(frozen=True)
class Best:
    """The best rate of an optimizer at a width. `inside` is whether the grid goes on to both
    sides of it; if it does not, the best rate may lie beyond."""

    optimizer: str
    width: int
    rate: float
    loss: float
    inside: bool


def read_sweep(path: Path) -> Sweep:
    """The sweep of a file. Raises ConfigError naming everything that is wrong with it."""
    binder = Binder(Sweep)
    sweep = binder.bind(Sweep, read_merged(path, []))
    if sweep is None:
        raise InvalidConfigError([f"{path}: {problem}" for problem in binder.problems])
    problems = list(_problems(sweep))
    if problems:
        raise InvalidConfigError([f"{path}: {problem}" for problem in problems])
    return sweep


def _problems(sweep: Sweep) -> list[str]:
    """What is wrong with the grid."""
    found = [
        f"widths must be multiples of head_dim = {sweep.head_dim}, got {width}"
        for width in (*sweep.widths, sweep.base_width)
        if sweep.head_dim < 1 or width < 1 or width % sweep.head_dim
    ]
    for name, values in (("seeds", sweep.seeds), ("widths", sweep.widths)):
        if not values or len(set(values)) < len(values):
            found.append(f"{name} must be different ones, at least one, got {values}")
    if sweep.ffn_ratio <= 0:
        found.append(f"ffn_ratio must be positive, got {sweep.ffn_ratio}")
    for name, each in sweep.optimizers.items():
        if len(set(each.rates)) < 3 or min(each.rates) <= 0:
            found.append(f"optimizers.{name}.rates must be three or more positive ones")
    return found


def settings(sweep: Sweep, name: str, width: int, rate: float) -> list[str]:
    """Overrides with which one place of the grid is trained."""
    swept = sweep.optimizers[name]
    common = [*sweep.overrides, *swept.overrides]
    config = load_config(ROOT / swept.config, common)
    own = shape_overrides(sweep, width) + rate_overrides(sweep, swept, config, width, rate)
    return [*common, *own]


def shape_overrides(sweep: Sweep, width: int) -> list[str]:
    """Overrides that give a model its width, with heads of the same size."""
    heads = width // sweep.head_dim
    return [
        f"model.hidden={width}",
        f"model.heads={heads}",
        f"model.kv_heads={heads}",
        f"model.ffn={round(sweep.ffn_ratio * width)}",
    ]


def rate_overrides(
    sweep: Sweep, swept: Swept, config: Config, width: int, rate: float
) -> list[str]:
    """Overrides of the matrices' rate, and of what muP asks for the head."""
    factor = sweep.base_width / width
    matrix = rate * (factor if swept.rate_scaling == "mup" else 1.0)
    return [
        f"optimizer.matrix.lr={matrix:.6g}",
        f"optimizer.head.lr={config.optimizer.head.lr * factor:.6g}",
        f"model.init.head_std={config.model.init.head_std * factor:.6g}",
    ]


def label(optimizer: str, width: int, rate: float) -> str:
    """The name of a place of the grid, as its run folders have it."""
    return f"{optimizer}-{width}-{rate:g}"


def run_grid(
    sweep: Sweep, output: Path, where: Sequence[Place], overrides: Sequence[str] = ()
) -> list[Point]:
    """Every point, trained now where it was not before. Raises InputError if a run cannot train."""
    grid = [
        (name, width, rate)
        for name, swept in sweep.optimizers.items()
        for rate, width in product(swept.rates, sweep.widths)
    ]

    def run_of(each: tuple[int, tuple[str, int, float]]) -> Run:
        seed, place = each
        own = [*settings(sweep, *place), *overrides, f"seed={seed}"]
        config = sweep.optimizers[place[0]].config
        return Run(f"{label(*place)}-{seed}", config, tuple(last_of_each(own)))

    with closing(Trainer(output, RecordBook(output), where)) as trainer:
        runs = list(product(sweep.seeds, grid))
        records = trainer.records(map(run_of, runs))
        losses = {each: record.loss for each, record in zip(runs, records, strict=True)}
    points = []
    for place in grid:
        mine = [losses[seed, place] for seed in sweep.seeds]
        finite = [each for each in mine if each is not None]
        mean = statistics.mean(finite) if len(finite) == len(mine) else None
        points.append(Point(*place, mine, mean))
    return points


def best_rates(points: Sequence[Point]) -> list[Best]:
    """The best rate of every optimizer and width that has one, in the order of `points`."""
    rows: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        rows.setdefault((point.optimizer, point.width), []).append(point)
    found = []
    for (optimizer, width), row in rows.items():
        rates = [point.rate for point in row]
        known = [(point.loss, point.rate) for point in row if point.loss is not None]
        if known:
            loss, rate = min(known)
            inside = min(rates) < rate < max(rates)
            found.append(Best(optimizer, width, rate, loss, inside))
    return found


def verdicts(best: Sequence[Best]) -> dict[str, str]:
    """By optimizer, whether its best rate is the same at every width."""
    found = {}
    for optimizer in dict.fromkeys(each.optimizer for each in best):
        mine = [each for each in best if each.optimizer == optimizer]
        text = ", ".join(f"{each.rate:g} at {each.width}" for each in mine)
        same = len({each.rate for each in mine}) == 1
        edge = "" if all(each.inside for each in mine) else "; at the edge of the grid"
        found[optimizer] = f"{'the same' if same else 'NOT the same'}: {text}{edge}"
    return found


def write(output: Path, sweep: Sweep, points: Sequence[Point], overrides: Sequence[str]) -> None:
    """Write results.json."""
    best = best_rates(points)
    content = {
        **asdict(sweep),
        "command_overrides": list(overrides),
        "points": [asdict(point) for point in points],
        "best": [asdict(each) for each in best],
        "verdicts": verdicts(best),
    }
    (output / "results.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def draw(output: Path) -> None:
    """Write loss_against_rate.svg, if matplotlib is installed."""
    try:
        from scripts.plots.style import save
        from scripts.plots.sweep import plot_sweep
    except ImportError as error:
        print(f"no plot: {error}: pip install matplotlib", flush=True)
        return
    save(plot_sweep(output / "results.json"), output / "loss_against_rate.svg")


def grid_table(points: Sequence[Point]) -> str:
    """Losses by optimizer and width, a column per rate, the best of a row starred."""
    best = {(each.optimizer, each.width): each.rate for each in best_rates(points)}
    sections = []
    for optimizer in dict.fromkeys(point.optimizer for point in points):
        mine = [point for point in points if point.optimizer == optimizer]
        rates = list(dict.fromkeys(point.rate for point in mine))
        losses = {(point.width, point.rate): point.loss for point in mine}
        rows = []
        for width in dict.fromkeys(point.width for point in mine):
            starred = best.get((optimizer, width))
            cells = (_cell(losses[width, rate], rate == starred) for rate in rates)
            rows.append((str(width), *cells))
        sections.append(table((optimizer, *(f"{rate:g}" for rate in rates)), rows))
    return "\n\n".join(sections)


def _cell(loss: float | None, best: bool) -> str:
    return "-" if loss is None else f"{loss:.4f}{'*' * best}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", type=Path, help="YAML file of the sweep")
    parser.add_argument("output", type=Path, help="folder of its runs and results")
    add_places(parser)
    parser.add_argument(
        "--optimizers", nargs="+", metavar="NAME", help="only these of the file's optimizers"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="key=value", help="over every run's config"
    )
    return parser.parse_args(arguments)


def chosen(sweep: Sweep, names: Sequence[str] | None) -> Sweep:
    """`sweep` with the named optimizers alone. Raises ConfigError for a name it does not have."""
    for name in names or ():
        if name not in sweep.optimizers:
            raise ConfigError(
                f"optimizers must be among {', '.join(sweep.optimizers)}, got {name!r}"
            )
    if names is None:
        return sweep
    optimizers = {name: sweep.optimizers[name] for name in names}
    return Sweep(**{**vars(sweep), "optimizers": optimizers})


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code."""
    options = parse(arguments)
    output = options.output.absolute()
    sweep = chosen(read_sweep(options.sweep), options.optimizers)
    points = run_grid(sweep, output, places(options), options.set)
    write(output, sweep, points, options.set)
    draw(output)
    print(grid_table(points))
    for optimizer, verdict in verdicts(best_rates(points)).items():
        print(f"{optimizer}: best rate {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
