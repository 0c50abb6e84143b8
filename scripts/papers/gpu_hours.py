"""GPU-hours of the papers' full runs, by the planner; gpu_hours.json keeps them for the page."""

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Final, TypedDict

from parallel.plan.devices import device_named
from training.config import check, load_config

ROOT: Final = Path(__file__).resolve().parents[2]
FILE: Final = Path(__file__).with_name("gpu_hours.json")


class Hours(TypedDict):
    """GPUs of a run, and its GPU-hours on them by the planner."""

    gpus: int
    gpu_hours: float


def key_of(run: str) -> str:
    """Return the key of a run, RECIPE [OVERRIDES]: without what does not change its time."""
    recipe, *overrides = shlex.split(run)
    kept = [each for each in overrides if not each.startswith(("run.", "seed="))]
    return " ".join([recipe, *kept])


def planned(run: str) -> Hours:
    """Plan a run on the GPUs that its recipe names."""
    # These load the engine, which a page does not need.
    from training.dry_run import plan_run
    from training.planning.added_cost import run_hours

    recipe, *overrides = shlex.split(run)
    config = load_config(ROOT / "configs" / f"{recipe}.yaml", overrides)
    gpus = config.plan.gpus or 8
    check(config, gpus)
    plan = plan_run(config, gpus, device_named(config.plan.device))
    return {"gpus": gpus, "gpu_hours": float(f"{run_hours(config, plan):.3g}")}


def read_hours() -> dict[str, Hours]:
    """Read the stored table."""
    stored: dict[str, Hours] = json.loads(FILE.read_text(encoding="utf-8"))
    return stored


def write_hours(runs: Iterable[str]) -> None:
    """Plan every run and store the table."""
    table = {key: planned(key) for key in sorted({key_of(run) for run in runs})}
    FILE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
