"""The planning commands `pretrain.py --dry-run` and `pretrain.py --fit`. If a run does not fit its
devices, `--dry-run` lists changes that save memory and, if possible, a combination of changes that
makes the run fit."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel.comm.groups import world_size
from parallel.plan.devices import GIB
from parallel.plan.planner import Plan
from training.checkpoint.initial_weights import chosen_weights
from training.config import Config, check
from training.config.checks import legal_micro_batches, legal_ranks
from training.config.yaml_files import flat, merged_overrides
from training.data.build_data import check_rows, missing_files, with_vocabulary
from training.data.manifest import shared_text
from training.dry_run import device_named, plan_run
from training.errors import ConfigError, InputError
from training.planning.added_cost import planned_cost, run_hours
from training.planning.layout_search import (
    LEVELS,
    LOSS_CHUNK,
    Changes,
    Layouts,
    Variant,
    best_layouts,
    changed,
    legal_layouts,
    overlay,
    search_table,
)
from training.planning.plan_screen import describe
from training.report.text import table


def dry_run(config: Config, gpus: int | None, device: str | None, json_file: str | None) -> None:
    """Print the plan of a run, and write it to `json_file` if given.

    `gpus` defaults to torchrun's world size if that is above 1, otherwise to `plan.gpus`. If
    `plan.gpus` is null as well, `gpus` defaults to the smallest legal number of GPUs.
    """
    config = with_vocabulary(config)
    warn(config)
    machine = device_named(device or config.plan.device)
    gpus = gpus or own_gpus(config)
    check(config, gpus)
    planned = plan_run(config, gpus, machine)
    print(describe(config, planned))
    if not planned.fits:
        print(remedy_table(Layouts(config, gpus, machine), planned))
    if json_file is not None:
        content = planned.as_dict()
        content["monitors"] = planned_cost(config, planned).as_dict()
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
    """Print the fastest layouts for a run, and write the best one to `write` as a config that
    extends `base` and includes `overrides`.

    Raises ConfigError if no layout is legal or no legal layout fits.
    """
    config = with_vocabulary(config)
    warn(config)
    device = device or config.plan.device
    layouts = Layouts(config, gpus or own_gpus(config), device_named(device))
    best = best_layouts(layouts)
    if not best:
        if next(legal_layouts(layouts), None) is None:
            # The error lists legal GPU counts; micro-batch 1 allows the most.
            check(changed(config, {"train.micro_batch": 1}), layouts.gpus)
        raise ConfigError(
            f"no layout fits {layouts.gpus} x {layouts.device.name}: use more or larger GPUs"
        )
    for key, value in flat(merged_overrides(overrides)):
        if best[0].changes.get(key, value) != value:
            chosen = assignment({key: best[0].changes[key]})
            print(
                f"warning: the search replaces override {key}={value} with {chosen}",
                file=sys.stderr,
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


def warn(config: Config) -> None:
    """Print to stderr the warnings and errors that a run would print about data and initial
    weights.

    The vocabulary size may still be null.
    """
    for text in (*shared_text(config.data), *missing_files(config)):
        print(f"warning: {text}", file=sys.stderr)
    try:
        if config.checkpoint.initialize_from is not None:
            chosen_weights(config)
        elif config.model.vocab_size is not None:
            check_rows(config)
    except InputError as error:
        print(f"warning: a new run would fail: {error}", file=sys.stderr)


def own_gpus(config: Config) -> int:
    """Return the default number of GPUs for a plan."""
    started = world_size()
    if started > 1:
        return started
    return config.plan.gpus or next(iter(legal_ranks(config)), config.parallel.model_ranks)


def remedies(layouts: Layouts) -> list[Variant]:
    """Return the variants of a run that save memory by a single change, sorted by step time."""
    config, before = layouts.config, layouts.plan({}).memory.total
    train, parallel, model = config.train, config.parallel, config.model
    candidates: list[Changes] = []
    if train.loss_chunk is None and model.padded_vocab // parallel.tensor > LOSS_CHUNK:
        candidates.append({"train.loss_chunk": LOSS_CHUNK})
    for level in LEVELS[LEVELS.index(train.recompute) + 1 :]:
        candidates.append({"train.recompute": level})
    smaller = [n for n in legal_micro_batches(config, layouts.gpus) if n < train.micro_batch]
    for size in sorted(smaller, reverse=True)[:2]:
        candidates.append({"train.micro_batch": size})
    for key in ("tensor", "pipeline", "expert"):
        candidates.append({f"parallel.{key}": 2 * getattr(parallel, key)})
    variants: list[Variant] = []
    for changes in candidates:
        if layouts.legal(changes) and layouts.sound(changes):
            planned = layouts.plan(changes)
            if planned.memory.total < before:
                variants.append(Variant(changes, planned))
    return sorted(variants, key=lambda each: each.plan.time.total)


def combined(layouts: Layouts, variants: list[Variant]) -> Variant | None:
    """Combine the changes of `variants`, in order, until the run fits. Return None if the run still
    does not fit."""
    for remedy in variants:
        if remedy.plan.fits:
            return remedy
    changes: dict[str, Any] = {}
    least = layouts.plan({}).memory.total
    for remedy in variants:
        tried = {**changes, **remedy.changes}
        if not layouts.legal(tried):
            continue
        planned = layouts.plan(tried)
        if planned.memory.total < least:
            changes, least = tried, planned.memory.total
        if planned.fits:
            return Variant(changes, planned)
    return None


def remedy_table(layouts: Layouts, planned: Plan) -> str:
    """Return a table of the memory saved and the time added by each change, followed by a
    combination of changes that fits."""
    variants = remedies(layouts)
    rows = [
        (
            assignment(remedy.changes),
            f"{(remedy.plan.memory.total - planned.memory.total) / GIB:+.1f}",
            f"{remedy.plan.time.total / planned.time.total - 1:+.1%}",
            "fits" if remedy.plan.fits else "",
        )
        for remedy in variants
    ]
    shown = table(("would help", "GiB", "time", ""), rows)
    together = combined(layouts, variants)
    if together is None:
        return f"{shown}\nthese changes are not enough: try --fit, or use more GPUs"
    return (
        f"{shown}\nfits with {assignment(together.changes)}: "
        f"{together.plan.memory.total / GIB:.1f} GiB, "
        f"{together.plan.time.total / planned.time.total - 1:+.1%} time"
    )


def assignment(changes: Changes) -> str:
    """Format `changes` as command-line overrides."""
    return " ".join(f"{key}={'null' if v is None else v}" for key, v in changes.items())
