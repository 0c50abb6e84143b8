"""An experiment, and how it is run.

An experiment computes `data` (plain numbers, from which its figure is drawn) and `checks`. A check
is a property that holds for every seed and size, or, only at the published size and seed, a number
that was published or computed independently for exactly that setting.
"""

import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from matplotlib.figure import Figure

from scripts.experiments.check import Check
from scripts.plots.style import save

Sizes = TypeVar("Sizes")
Data = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The result of an experiment's `run`."""

    checks: Sequence[Check]
    data: Data


@dataclass(frozen=True)
class Experiment(Generic[Sizes]):
    """A registered experiment: `run(sizes, seed, published)` and `draw(data)`.

    `published` is whether sizes and seed are those whose numbers are known.
    """

    name: str
    title: str
    source: str
    seed: int
    full: Sizes
    small: Sizes
    run: Callable[[Sizes, int, bool], Outcome]
    draw: Callable[[Data], Figure]


@dataclass(frozen=True)
class Result:
    """A finished experiment."""

    name: str
    source: str
    checks: Sequence[Check]
    seconds: float

    @property
    def failed(self) -> int:
        """The number of checks that did not pass."""
        return sum(not check.passed for check in self.checks)


def perform(
    experiment: Experiment[Any], output: Path, *, seed: int | None, small: bool, suffix: str
) -> Result:
    """Run one experiment, and write NAME.json and the figure NAME`suffix` to `output`."""
    sizes = experiment.small if small else experiment.full
    seed = experiment.seed if seed is None else seed
    published = not small and seed == experiment.seed
    begin = time.perf_counter()
    outcome = experiment.run(sizes, seed, published)
    seconds = time.perf_counter() - begin
    result = Result(experiment.name, experiment.source, outcome.checks, seconds)
    content = {
        "name": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "passed": result.failed == 0,
        "published_setting": published,
        "settings": asdict(sizes) | {"seed": seed},
        "versions": versions(),
        "seconds": round(seconds, 1),
        "checks": [described(check) for check in outcome.checks],
        "data": rounded(outcome.data),
    }
    path = output / f"{experiment.name}.json"
    path.write_text(json.dumps(plain(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    save(experiment.draw(outcome.data), output / f"{experiment.name}{suffix}")
    return result


def described(check: Check) -> dict[str, Any]:
    """A check and its verdict as plain values."""
    return asdict(check) | {"passed": check.passed}


def versions() -> dict[str, Any]:
    """Versions of the packages, and the machine."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def read_result(path: Path) -> Result:
    """Read the result that `perform` wrote to NAME.json."""
    return result_of(json.loads(path.read_text(encoding="utf-8")))


def result_of(content: Mapping[str, Any]) -> Result:
    """The result in a NAME.json or an entry of results.json."""
    absent: dict[str, Any] = {"measured": math.nan, "low": -math.inf, "high": math.inf}
    checks = [
        Check(**{k: absent[k] if v is None else v for k, v in each.items() if k != "passed"})
        for each in content["checks"]
    ]
    return Result(content["name"], content["source"], checks, content["seconds"])


def plain(value: Any) -> Any:
    """Replace infinite and undefined numbers by None, as JSON has none."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rounded(value: Any) -> Any:
    """Round floats to six digits, enough to draw."""
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
