"""Run experiments: check their numbers, and write result files, figures and tables."""

import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from inspect import getdoc
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import yaml
from matplotlib.figure import Figure

from scripts.experiments.experiment import Check, Draws, Outcome, Panel
from scripts.experiments.networks import gated_batches, gated_regression, sparse_regression
from scripts.experiments.pc_layers import deep_linear, over_flattening
from scripts.experiments.random_features import (
    gated_features,
    pi_bound,
    rank_growth,
    relu_features,
)
from scripts.experiments.solver_curve import solver_curve
from scripts.experiments.weight_norms import correlated_weights, muon_gap
from scripts.plots.style import COLORS, new_figure, save
from spectral.batching import grouped


class Experiment(NamedTuple):
    """An experiment: its function, the seed of the published run, and the sizes for tests."""

    run: Callable[..., Outcome]
    seed: int
    small: dict[str, Any]

    @property
    def title(self) -> str:
        """The experiment's claim, which is the first paragraph of the function's docstring."""
        return " ".join((getdoc(self.run) or "").split("\n\n")[0].split())

    def settings(self, *, small: bool) -> dict[str, Any]:
        """Return the paper's sizes or, with `small`, the test sizes."""
        sizes = self.run.__kwdefaults__ or {}
        return sizes | self.small if small else sizes


EXPERIMENTS: Final = {
    each.run.__name__: each
    for each in (
        Experiment(pi_bound, 0, {"shapes": ((64, 32, 128), (256, 128, 512))}),
        Experiment(relu_features, 0, {"sizes": (15, 30, 120), "steps": 60, "restart": 20}),
        Experiment(gated_features, 0, {"sizes": (25, 50, 200), "steps": 200}),
        Experiment(rank_growth, 0, {"widths": (64, 128), "repeats": 2, "times": (0, 1, 10, 100)}),
        Experiment(sparse_regression, 42, {
            "samples": 128, "inputs": 24, "hidden": 64, "steps": 60, "interval": 10,
            "polar_steps": 10, "gd_rate": 0.02, "spectral_rate": 0.02,
        }),
        Experiment(gated_batches, 42, {"batches": (128, 512, 2048), "inputs": 64, "hidden": 192}),
        Experiment(gated_regression, 42, {
            "batches": (96, 768), "steps": (41, 21), "inputs": 24, "hidden": 48, "interval": 10,
            "polar_steps": 10,
        }),
        Experiment(deep_linear, 0, {"widths": (6, 8, 4), "samples": 4, "steps": 400}),
        Experiment(over_flattening, 0, {"side": 12, "steps": 60, "adamw": 4e-2, "muon": 1e-1}),
        Experiment(
            muon_gap, 0, {"shapes": ((8, 8), (48, 48)), "repeats": 8, "side": 24, "steps": 60}
        ),
        Experiment(correlated_weights, 0, {"n": 300, "repeats": 500, "side": 32}),
        Experiment(solver_curve, 0, {"shapes": ((48, 144), (128, 64)), "repeats": 3}),
    )
}  # fmt: skip
"""The experiments by name."""
RECORDED: Final = Path(__file__).with_name("recorded.yaml")
"""File with numbers recorded in an earlier run of each experiment."""
HEADINGS: Final = ("experiment", "figure", "measured", "expected", "from", "")


@dataclass(frozen=True)
class Result:
    """A finished experiment."""

    name: str
    checks: Sequence[Check]
    seconds: float

    @property
    def failed(self) -> int:
        """Number of failed checks."""
        return sum(not check.passed for check in self.checks)

    def content(self) -> dict[str, Any]:
        """Return the contents of the result's JSON file."""
        checks = []
        for check in self.checks:
            # JSON has no infinity, so the infinite end of a range is null.
            values = {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in asdict(check).items()
            }
            checks.append({**values, "passed": check.passed})
        seconds = round(self.seconds, 1)
        return {"name": self.name, "seconds": seconds, "passed": not self.failed, "checks": checks}


def perform(name: str, output: Path, *, seed: int | None, small: bool, suffix: str) -> Result:
    """Run an experiment and write NAME.json and the figure NAME`suffix` to `output`. If the
    experiment diverges, the result is a single failed check, and any previous figure is removed."""
    experiment = EXPERIMENTS[name]
    published = not small and seed in (None, experiment.seed)
    seed = experiment.seed if seed is None else seed
    settings = experiment.settings(small=small)
    begin = time.perf_counter()
    try:
        outcome = experiment.run(Draws(seed), **settings)
    except FloatingPointError as error:  # step sizes are tuned for the published seed
        outcome = Outcome([Check(f"diverged runs ({error})", 1, 0, 0, "theory")], {}, [])
    seconds = time.perf_counter() - begin
    data = json.loads(json.dumps(outcome.data))
    checks = [*outcome.checks]
    if published:
        numbers = yaml.load(RECORDED.read_text(encoding="utf-8"), yaml.BaseLoader)
        checks += compared(numbers.get(name, {}), data, ())
    result = Result(name, checks, seconds)
    write_json(
        output / f"{name}.json",
        result.content()
        | {
            "title": experiment.title,
            "published_setting": published,
            "settings": settings | {"seed": seed},
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "machine": platform.machine(),
                "threads": torch.get_num_threads(),
            },
            "data": data,
        },
    )
    figure = output / f"{name}{suffix}"
    if outcome.panels:
        save(drawn(outcome.panels), figure)
    else:
        figure.unlink(missing_ok=True)
    return result


def drawn(panels: Sequence[Panel]) -> Figure:
    """Draw the figure of an experiment."""
    figure, axes = new_figure(len(panels), width=5.0 if len(panels) < 3 else 4.2)
    for axis, panel in zip(axes, panels, strict=True):
        for lines, style in ((panel.lines, "-"), (panel.dashed, "--"), (panel.dots, "o")):
            axis.set_prop_cycle(color=COLORS)
            for label, values in lines.items():
                by_x = values if isinstance(values, Mapping) else dict(enumerate(values))
                xs = [float(x) for x in by_x]
                axis.plot(xs, list(by_x.values()), style, markersize=4, label=label)
        for label, level in panel.levels.items():
            axis.axhline(level, color="0.3", linestyle=":", label=label)
        axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        if "x" in panel.log:
            axis.set_xscale("symlog" if axis.dataLim.x0 <= 0 else "log")
        else:
            axis.locator_params(axis="x", nbins=5)
        if "y" in panel.log:
            axis.set_yscale("log")
        axis.legend(fontsize=8)
    return figure


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def expectation(check: Check) -> str:
    """Format the range of a check."""
    if math.isinf(check.high):
        return f">= {check.low:.4g}"
    if math.isinf(check.low):
        return f"<= {check.high:.4g}"
    low, high = f"{check.low:.4g}", f"{check.high:.4g}"
    return low if low == high else f"{low} to {high}"


def room(check: Check) -> float:
    """Return the distance of a check's number from the nearest end of its range, as a fraction of
    the range."""
    size = check.high - check.low
    least = min(check.measured - check.low, check.high - check.measured)
    return least / size if 0 < size < math.inf else least


def rows(result: Result) -> Iterator[tuple[str, ...]]:
    """Yield the table rows for an experiment (columns `HEADINGS`). Passing checks in a series share
    a row, which shows the number that is closest to a limit."""
    for members in grouped(result.checks, lambda check: check.series or check.name).values():
        shown, about = [check for check in members if not check.passed], ""
        if not shown:
            shown = [min(members, key=room)]
            about = f"{len(members)} numbers; worst: " if len(members) > 1 else ""
        for check in shown:
            measured, verdict = f"{check.measured:.4g}", "pass" if check.passed else "FAIL"
            yield (result.name, about + check.name, measured, expectation(check), check.source,
                   verdict)  # fmt: skip


def compared(expected: Any, measured: Any, path: tuple[str, ...]) -> Iterator[Check]:
    """For each number in `expected`, yield a check of the number at the same path in `measured`."""
    if isinstance(expected, str):
        low, high = bounds(expected)
        yield Check(", ".join(path), measured, low, high, "recorded", ", ".join(path[:-1]))
        return
    for key, inner in expected.items():
        value = measured[int(key) if isinstance(measured, list) else key]
        yield from compared(inner, value, (*path, key))


def bounds(text: str) -> tuple[float, float]:
    """Parse a range: `LOW to HIGH`, `NUMBER ± PERCENT%` or `NUMBER`.

    `NUMBER` alone means NUMBER plus or minus one unit in the last digit.
    """
    if " to " in text:
        low, high = text.split(" to ")
        return float(low), float(high)
    number, _, percent = text.partition(" ± ")
    if percent:
        slack = abs(float(number)) * float(percent.removesuffix("%")) / 100
    else:
        # The factor makes up for rounding the bounds to binary.
        slack = 1.001 * float(Decimal(10) ** int(Decimal(number).as_tuple().exponent))
    return float(number) - slack, float(number) + slack
