"""Saves a model's state to a folder and waits until all of it is written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel.checkpoint.state_writer import first_rank, start_save
from parallel.model import ParallelModel
from parallel.optimizer.optimizer import DistributedOptimizer


def save_state(
    folder: str | Path,
    model: ParallelModel,
    optimizer: DistributedOptimizer,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Save the state of model and optimizer to a new `folder`; all ranks together."""
    first_rank(lambda: Path(folder).mkdir(parents=True))
    save = start_save(folder, model, optimizer, extra)
    assert save.writer.poll(timeout=600.0), "the writer takes more than ten minutes"
    save.finish()
