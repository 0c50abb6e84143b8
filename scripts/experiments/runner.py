"""Running an experiment: check its numbers, write its result and figure, and format tables."""

import inspect
import json
import math
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
import yaml
from matplotlib.figure import Figure

from scripts.experiments.experiment import Check, Draws, Outcome, Panel
from scripts.plots.style import COLORS, draw_lines, new_figure, save
from spectral.batching import grouped

SEEDS: Final = {
    "pi_bound": 0, "relu_features": 0, "gated_features": 0, "rank_growth": 0,
    "sparse_regression": 42, "gated_batches": 42, "gated_regression": 42, "deep_linear": 0,
    "over_flattening": 0, "muon_gap": 0, "correlated_weights": 0, "solver_curve": 0,
}  # fmt: skip
"""The experiments and the seeds of their published runs."""
RECORDED: Final = Path(__file__).with_name("recorded.yaml")
"""File with numbers of an earlier run of each experiment."""
HEADINGS: Final = ("experiment", "figure", "measured", "expected", "from", "")


@dataclass(frozen=True)
class Result:
    """A finished experiment."""

    name: str
    checks: Sequence[Check]
    seconds: float

    @property
    def failed(self) -> int:
        """The number of failed checks."""
        return sum(not check.passed for check in self.checks)

    def content(self) -> dict[str, Any]:
        """Return the content of the result's JSON file."""
        checks = [{**finite(asdict(check)), "passed": check.passed} for check in self.checks]
        seconds = round(self.seconds, 1)
        return {"name": self.name, "seconds": seconds, "passed": not self.failed, "checks": checks}


def module_of(name: str) -> ModuleType:
    """Return the module of an experiment."""
    return import_module(f"scripts.experiments.{name}")


def title(name: str) -> str:
    """Return the claim of an experiment: the first paragraph of its module's docstring."""
    return " ".join((module_of(name).__doc__ or "").split("\n\n")[0].split())


def settings(name: str, *, small: bool) -> dict[str, Any]:
    """Return the settings of an experiment: the paper's, or with `small` the settings of tests."""
    module = module_of(name)
    _, *sizes = inspect.signature(module.experiment).parameters.values()
    return {size.name: size.default for size in sizes} | (module.SMALL if small else {})


def outcome_of(name: str, seed: int, *, small: bool) -> Outcome:
    """Run an experiment."""
    outcome: Outcome = module_of(name).experiment(Draws(seed), **settings(name, small=small))
    return outcome


def perform(name: str, output: Path, *, seed: int | None, small: bool, suffix: str) -> Result:
    """Run an experiment; write NAME.json and the figure NAME`suffix` to `output`."""
    published = not small and seed in (None, SEEDS[name])
    seed = SEEDS[name] if seed is None else seed
    begin = time.perf_counter()
    outcome = outcome_of(name, seed, small=small)
    seconds = time.perf_counter() - begin
    data = json.loads(json.dumps(outcome.data))
    checks = [*outcome.checks, *(recorded(name, data) if published else [])]
    result = Result(name, checks, seconds)
    write_json(
        output / f"{name}.json",
        result.content()
        | {
            "title": title(name),
            "published_setting": published,
            "settings": settings(name, small=small) | {"seed": seed},
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "machine": platform.machine(),
                "threads": torch.get_num_threads(),
            },
            "data": data,
        },
    )
    save(drawn(outcome.panels), output / f"{name}{suffix}")
    return result


def drawn(panels: Sequence[Panel]) -> Figure:
    """Return the figure of an experiment."""
    figure, axes = new_figure(len(panels), width=5.0 if len(panels) < 3 else 4.2)
    for axis, panel in zip(axes, panels, strict=True):
        for lines, style in ((panel.lines, "-"), (panel.dashed, "--"), (panel.dots, "o")):
            axis.set_prop_cycle(color=COLORS)
            if lines:
                draw_lines(axis, lines, style)
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


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace infinite values (open ends of ranges) with None, because JSON has no infinity."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


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
    """Return the distance from a number to the nearer end of its range, as a fraction of the
    range."""
    size = check.high - check.low
    least = min(check.measured - check.low, check.high - check.measured)
    return least / size if 0 < size < math.inf else least


def rows(result: Result) -> Iterator[tuple[str, ...]]:
    """Yield the table rows of an experiment (columns `HEADINGS`); passed checks of a series share
    one row, which shows the worst check."""
    for members in grouped(result.checks, lambda check: check.series or check.name).values():
        shown, about = [check for check in members if not check.passed], ""
        if not shown:
            shown = [min(members, key=room)]
            about = f"{len(members)} numbers; worst: " if len(members) > 1 else ""
        for check in shown:
            measured, verdict = f"{check.measured:.4g}", "pass" if check.passed else "FAIL"
            yield (result.name, about + check.name, measured, expectation(check), check.source,
                   verdict)  # fmt: skip


def recorded(name: str, data: Any) -> list[Check]:
    """Return checks of an experiment's data, read from JSON, against recorded.yaml."""
    numbers = yaml.load(RECORDED.read_text(encoding="utf-8"), yaml.BaseLoader)
    return list(compared(numbers.get(name, {}), data, ()))


def compared(expected: Any, measured: Any, path: tuple[str, ...]) -> Iterator[Check]:
    """Yield a check per number in `expected` against the number at the same path in `measured`."""
    if isinstance(expected, str):
        low, high = bounds(expected)
        yield Check(", ".join(path), measured, low, high, "recorded", ", ".join(path[:-1]))
        return
    for key, inner in expected.items():
        value = measured[int(key) if isinstance(measured, list) else key]
        yield from compared(inner, value, (*path, key))


def bounds(text: str) -> tuple[float, float]:
    """Parse a range: `LOW to HIGH`, `NUMBER ± PERCENT%` or `NUMBER`.

    The range of `NUMBER` extends one unit of its last digit in both directions.
    """
    if " to " in text:
        low, high = text.split(" to ")
        return float(low), float(high)
    number, _, percent = text.partition(" ± ")
    if percent:
        slack = abs(float(number)) * float(percent.removesuffix("%")) / 100
    else:
        # The factor allows for rounding of the bounds in binary.
        slack = 1.001 * float(Decimal(10) ** int(Decimal(number).as_tuple().exponent))
    return float(number) - slack, float(number) + slack
