"""The search for the fastest layout of a model on a number of GPUs.

Every legal layout has a lower bound of its memory and its time that is cheap to compute
(parallel/plan/step_time.py). Plans are made in the order of the bounds, and the search ends when
no layout that is left can be among the best: these are the best of all, not of a sample.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from heapq import nsmallest
from typing import Any, Final

from tqdm import tqdm

from parallel.plan.devices import GIB
from parallel.plan.step_time import fits_at_best, least_seconds
from training.config.checks import divisors
from training.config.yaml_files import as_yaml, escaped, merged_overrides, over
from training.planning.layouts import AXES, LEVELS, Changes, Layouts, Variant, by_section, changed
from training.planning.remedies import LOSS_CHUNK
from training.report.table import table

BEST: Final = 10


def best_layouts(layouts: Layouts, count: int = BEST) -> list[Variant]:
    """Return the fastest layouts that fit, by modelled time, each with its best batch and
    recomputation."""
    flops = layouts.owned_flops()
    room = layouts.device.room
    bounds = []
    for number, changes in enumerate(legal_layouts(layouts)):
        shape = layouts.shape(changes)
        if fits_at_best(shape, room):
            bounds.append((least_seconds(shape, flops), number, changes))
    best: dict[tuple[int, ...], Variant] = {}
    slowest = math.inf
    ordered = sorted(bounds, key=lambda each: each[:2])
    print(f"plans up to {len(ordered):,} layouts, the most promising first", file=sys.stderr)
    for bound, _, changes in tqdm(ordered, unit=" plans", disable=None, leave=False):
        if bound >= slowest:
            break
        axes = tuple(changes[f"parallel.{name}"] for name in AXES)
        if axes in best and bound >= best[axes].seconds:
            continue
        planned = layouts.fitting_plan(changes)
        if planned is not None and (axes not in best or planned.time.total < best[axes].seconds):
            best[axes] = Variant(changes, planned)
            seconds = nsmallest(count, (each.seconds for each in best.values()))
            slowest = seconds[-1] if len(seconds) == count else math.inf
    return nsmallest(count, best.values(), key=lambda each: each.seconds)


def legal_layouts(layouts: Layouts) -> Iterator[Changes]:
    """Yield the changes of every legal layout, micro-batch, recomputation and loss chunk."""
    config, gpus = layouts.config, layouts.gpus
    chunks = (config.train.loss_chunk or LOSS_CHUNK, None)
    levels = [each for each in LEVELS if layouts.sound({"train.recompute": each})]
    for axes in _splits(layouts):
        base: dict[str, Any] = {f"parallel.{name}": axes[name] for name in AXES}
        base |= {f"parallel.{key}_stage_layers": None for key in ("first", "last")}
        copies = gpus // (axes["tensor"] * axes["pipeline"] * axes["context"])
        if math.gcd(*config.train.batches) % copies:
            continue
        passes = divisors(math.gcd(*config.train.batches) // copies)
        if not layouts.legal(base | {"train.micro_batch": 1}):
            continue
        for micro_batch in passes:
            count = math.gcd(*config.train.batches) // copies // micro_batch
            if axes["virtual_pipeline"] > 1 and count % axes["pipeline"]:
                continue
            for recompute in levels:
                for chunk in chunks:
                    yield base | {
                        "train.micro_batch": micro_batch,
                        "train.recompute": recompute,
                        "train.loss_chunk": chunk,
                    }


def _splits(layouts: Layouts) -> Iterator[dict[str, int]]:
    """Yield sizes of all axes; ranks that share matrices or sequences are in one node."""
    model, gpus, node = layouts.config.model, layouts.gpus, layouts.device.node_size
    experts = divisors(model.moe.experts) if model.moe is not None else [1]
    parts = divisors(node) if model.moe is not None else [1]
    for tensor in divisors(min(gpus, node)):
        for pipeline in (n for n in divisors(gpus // tensor) if model.layers % n == 0):
            stages = divisors(model.layers // pipeline) if pipeline > 1 else [1]
            for context in divisors(min(gpus // tensor // pipeline, node // tensor)):
                for virtual in stages:
                    for expert in experts:
                        for part in parts:
                            if gpus // pipeline % (expert * part) == 0:
                                sizes = (tensor, pipeline, virtual, context, expert, part)
                                yield dict(zip(AXES, sizes, strict=True))


def search_table(variants: list[Variant]) -> str:
    """Return a row per layout: what it is, its time and memory, and what takes its time."""
    rows = []
    for each in variants:
        time = asdict(each.plan.time)
        useful = time.pop("forward") + time.pop("backward")
        cost = max(time, key=lambda name: time[name])
        rows.append(
            (
                *(each.changes[f"parallel.{name}"] for name in AXES),
                each.changes["train.micro_batch"],
                each.changes["train.recompute"],
                each.changes["train.loss_chunk"] or "all",
                f"{each.plan.time.total:.3f}",
                f"{each.plan.mfu:.1%}",
                f"{each.plan.memory.total / GIB:.1f}",
                f"{cost} {time[cost] / each.plan.time.total:.1%}, computing "
                f"{useful / each.plan.time.total:.1%}",
            )
        )
    header = (
        "tensor", "pipeline", "virtual", "context", "expert", "expert-tensor", "micro-batch",
        "recompute", "loss chunk", "step s", "MFU", "GiB", "limited by",
    )  # fmt: skip
    return table(header, rows)


def overlay(
    layouts: Layouts, best: Variant, base: str, name: str, device: str, overrides: Sequence[str]
) -> str:
    """Return the text of a config `name` on top of the file `base` with the layout of `best`.

    It holds what `overrides` of the command line say too, so that it describes the same run.

    device     name or file of the device, as `plan.device` takes it
    """
    config = layouts.config
    changes = {k: v for k, v in best.changes.items() if changed(config, {k: v}) != config}
    changes |= {"plan.gpus": layouts.gpus, "plan.device": device, "run.name": name}
    changes["run.dir"] = config.run.dir.replace(config.run.name, name)
    content = over(merged_overrides(overrides), escaped(by_section(changes)))
    head = (
        f"# Layout by --fit on {layouts.gpus} x {layouts.device.name}: modelled "
        f"{best.seconds:.2f} s per step,\n"
        f"# MFU {best.plan.mfu:.0%}, {best.plan.memory.total / GIB:.0f} GiB per GPU.\n"
        f"# Rates and batch are those of the base: {config.optimizer.matrix.rule} at "
        f"{config.optimizer.matrix.lr:g}, {config.train.global_batch:,} sequences a step. For\n"
        "# another width, batch or number of tokens see docs/planning.md, Rates and batch.\n"
    )
    return f"{head}{as_yaml({'base': base})}\n{as_yaml(content)}"
