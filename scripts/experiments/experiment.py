"""An experiment, and how it is run.

An experiment computes `data` (plain numbers, from which its figure is drawn) and `checks` of
properties that hold for every seed and size. At the published size and seed its data are compared
with recorded.yaml too.
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

from scripts.experiments.check import Check, recorded
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
    """An experiment in its own module, which has its name, and whose docstring `about` says
    what it shows: `run(sizes, seed)` and `draw(data)`."""

    module: str
    about: str | None
    run: Callable[[Sizes, int], Outcome]
    draw: Callable[[Data], Figure]
    full: Sizes
    small: Sizes
    seed: int = 0

    @property
    def name(self) -> str:
        """The name on the command line."""
        return self.module.rsplit(".", 1)[-1]

    @property
    def title(self) -> str:
        """What it shows, in a sentence."""
        return " ".join((self.about or "").split("\n\n")[0].split())


@dataclass(frozen=True)
class Result:
    """A finished experiment."""

    name: str
    checks: Sequence[Check]
    seconds: float

    @property
    def failed(self) -> int:
        """The number of checks that did not pass."""
        return sum(not check.passed for check in self.checks)

    def content(self) -> Data:
        """What is stored of it."""
        checks = [asdict(check) | {"passed": check.passed} for check in self.checks]
        seconds = round(self.seconds, 1)
        return {"name": self.name, "seconds": seconds, "passed": not self.failed, "checks": checks}


def perform(
    experiment: Experiment[Any], output: Path, *, seed: int | None, small: bool, suffix: str
) -> Result:
    """Run one experiment, and write NAME.json and the figure NAME`suffix` to `output`."""
    sizes = experiment.small if small else experiment.full
    seed = experiment.seed if seed is None else seed
    published = not small and seed == experiment.seed
    begin = time.perf_counter()
    outcome = experiment.run(sizes, seed)
    seconds = time.perf_counter() - begin
    compared = recorded(experiment.name, outcome.data) if published else []
    result = Result(experiment.name, [*outcome.checks, *compared], seconds)
    content = result.content() | {
        "title": experiment.title,
        "published_setting": published,
        "settings": asdict(sizes) | {"seed": seed},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
        },
        "data": plain(outcome.data, digits=6),  # enough to draw
    }
    write_json(output / f"{experiment.name}.json", content)
    save(experiment.draw(outcome.data), output / f"{experiment.name}{suffix}")
    return result


def write_json(path: Path, content: Any) -> None:
    """Write results to a file."""
    text = json.dumps(plain(content), indent=1, allow_nan=False) + "\n"
    path.write_text(text, encoding="utf-8")


def result_of(content: Mapping[str, Any]) -> Result:
    """The result in a NAME.json or an entry of results.json."""
    absent: dict[str, Any] = {"measured": math.nan, "low": -math.inf, "high": math.inf}
    checks = [
        Check(**{k: absent[k] if v is None else v for k, v in stored.items() if k != "passed"})
        for stored in content["checks"]
    ]
    return Result(content["name"], checks, content["seconds"])


def plain(value: Any, digits: int = 17) -> Any:
    """Return nested values as JSON has them: floats of so many digits, None for those that are not
    finite."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner, digits) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, digits) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value
