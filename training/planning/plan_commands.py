"""The commands that plan a run: `pretrain.py --dry-run` and `pretrain.py --fit`."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from parallel.comm.groups import world_size
from training.config import Config, check
from training.config.checks import legal_ranks
from training.config.device_file import device_named
from training.data.build_data import with_vocabulary
from training.dry_run import plan_run, step_shape
from training.errors import ConfigError
from training.planning.added_cost import planned_cost, run_hours
from training.planning.layout_search import (
    Layouts,
    best_layouts,
    changed,
    legal_layouts,
    overlay,
    search_table,
)
from training.planning.plan_screen import describe
from training.planning.remedies import assignment, remedy_table


def dry_run(config: Config, gpus: int | None, device: str | None, json_file: str | None) -> None:
    """Print the plan of a run, and write it to `json_file`.

    If `gpus` is None, the number is that of torchrun's ranks, the config's, or the smallest
    possible.
    """
    config = with_vocabulary(config)
    machine = device_named(device or config.plan.device)
    gpus = gpus or own_gpus(config)
    check(config, gpus)
    planned = plan_run(config, gpus, machine)
    print(describe(config, planned))
    if not planned.fits:
        print(remedy_table(Layouts(config, gpus, machine), planned))
    if json_file is not None:
        content = planned.as_dict()
        shape = step_shape(config, gpus, machine)
        content["monitors"] = planned_cost(config, planned, shape).as_dict()
        content["gpu_hours"] = run_hours(config, planned)
        Path(json_file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def fit(
    config: Config,
    gpus: int | None,
    device: str | None,
    base: str,
    overrides: Sequence[str],
    write: str | None,
) -> None:
    """Print the fastest layouts of a run, and write the best to `write`, on top of the file `base`
    and its `overrides`.

    Raises ConfigError if no layout is legal or none fits.
    """
    config = with_vocabulary(config)
    device = device or config.plan.device
    layouts = Layouts(config, gpus or own_gpus(config), device_named(device))
    best = best_layouts(layouts)
    if not best:
        if next(legal_layouts(layouts), None) is None:
            # The error names legal numbers for the micro-batch that allows the most numbers of
            # GPUs.
            check(changed(config, {"train.micro_batch": 1}), layouts.gpus)
        raise ConfigError(
            f"no layout fits {layouts.gpus} x {layouts.device.name}: use more GPUs, or larger ones"
        )
    print(search_table(best))
    if write is None:
        print(f"best: {assignment(best[0].changes)}")
        return
    path = Path(write)
    below = os.path.relpath(base, path.parent)
    text = overlay(layouts, best[0], below, path.stem, device, overrides)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")


def own_gpus(config: Config) -> int:
    """Return the default number of GPUs of a plan."""
    started = world_size()
    if started > 1:
        return started
    return config.plan.gpus or next(iter(legal_ranks(config)), config.parallel.model_ranks)
