"""Changes that make a run fit its devices, cheapest first, with their costs."""

from collections.abc import Iterator
from typing import Any

from parallel.plan.devices import GIB
from parallel.plan.planner import Plan
from training.config.checks import legal_micro_batches
from training.planning.layout_search import LEVELS, LOSS_CHUNK, Changes, Layouts, Variant
from training.report.table import table


def remedies(layouts: Layouts) -> list[Variant]:
    """Return single changes that save memory, cheapest first."""
    before = layouts.plan({}).memory.total
    variants: list[Variant] = []
    for changes in _candidates(layouts):
        if layouts.legal(changes) and layouts.sound(changes):
            planned = layouts.plan(changes)
            if planned.memory.total < before:
                variants.append(Variant(changes, planned))
    return sorted(variants, key=lambda each: each.plan.time.total)


def combined(layouts: Layouts, variants: list[Variant]) -> Variant | None:
    """Return the fewest changes, added in order, that together make the run fit, or None if none
    do."""
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


def _candidates(layouts: Layouts) -> Iterator[Changes]:
    config = layouts.config
    train, parallel, model = config.train, config.parallel, config.model
    if train.loss_chunk is None and model.padded_vocab // parallel.tensor > LOSS_CHUNK:
        yield {"train.loss_chunk": LOSS_CHUNK}
    for level in LEVELS[LEVELS.index(train.recompute) + 1 :]:
        yield {"train.recompute": level}
    smaller = [n for n in legal_micro_batches(config, layouts.gpus) if n < train.micro_batch]
    for size in sorted(smaller, reverse=True)[:2]:
        yield {"train.micro_batch": size}
    for key in ("tensor", "pipeline", "expert"):
        yield {f"parallel.{key}": 2 * getattr(parallel, key)}


def remedy_table(layouts: Layouts, planned: Plan) -> str:
    """Return the savings and costs of each change, and the changes that fit together."""
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
        return f"{shown}\nnone of these is enough: see --fit, or use more GPUs"
    return (
        f"{shown}\nfits with {assignment(together.changes)}: "
        f"{together.plan.memory.total / GIB:.1f} GiB, "
        f"{together.plan.time.total / planned.time.total - 1:+.1%} time"
    )


def assignment(changes: Changes) -> str:
    """Return changes as overrides of the command line."""
    return " ".join(f"{key}={'null' if v is None else v}" for key, v in changes.items())
