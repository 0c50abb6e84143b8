"""What ranks do in the tests of recipes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from parallel.checkpoint.state import load_state
from parallel.comm import groups as process_groups
from tests.distributed.workers import rank_folder, start
from tests.saved_state import save_state
from tests.small_recipes import small_recipe
from training.build import build_data, build_trainer
from training.loop import Trainer

SAVED, ENDED = 24, 30


def saved_and_resumed(folder: str, names: Sequence[str]) -> dict[str, list[float]]:
    """The losses of each recipe, data-parallel at first, then tensor-parallel from a checkpoint."""
    found: dict[str, list[float]] = {}
    for layout, first, last in (({}, 0, SAVED), ({"tensor": 2}, SAVED, ENDED)):
        groups = start(layout)
        for name in names:
            config = small_recipe(name, rank_folder(folder), **layout)
            config = replace(
                config,
                train=replace(config.train, micro_batch=4),
                watchdog=replace(config.watchdog, replica_interval=1),
            )
            trainer = build_trainer(config, groups, *build_data(config))
            if first:
                load_state(Path(folder) / name, trainer.model, trainer.optimizer)
                for _ in range(first * trainer.microbatches):
                    next(trainer.batches)
            found.setdefault(name, []).extend(losses(name, trainer, first, last))
            if not first:
                save_state(Path(folder) / name, trainer.model, trainer.optimizer)
        process_groups.shutdown()
    return found


def losses(name: str, trainer: Trainer, first: int, last: int) -> Iterator[float]:
    """Yield the losses of some steps, which all are taken by all units."""
    for step in range(first, last):
        result = trainer.step(step)
        assert result.active.item(), f"{name}: step {step} was skipped"
        refused = [
            unit.name
            for unit, report in trainer.optimizer.reports()
            if report.get("refused", torch.zeros(())).item()
        ]
        assert not refused, f"{name}: step {step} of {refused} was refused"
        yield result.loss.item()
    assert trainer.weights is not None
    trainer.weights.check()
    for part in trainer.model.domains:
        for flat in part.buffers.parameters:
            assert torch.isfinite(flat).all(), f"{name} on rank {dist.get_rank()}"
