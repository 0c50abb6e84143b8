"""Save a model's state to a folder and wait until it is fully written, and change the metadata of a
checkpoint."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from parallel.checkpoint.state import sharded_state
from parallel.checkpoint.state_writer import PendingSave, StatePlanner, first_rank


def save_state(
    folder: str | Path, model: Any, optimizer: Any, extra: Mapping[str, Any] = {}
) -> None:
    """Save the state of a model and an optimizer to a new `folder`. Must be called on all ranks."""
    first_rank(lambda: Path(folder).mkdir(parents=True))
    model.wait_for_weights()
    planner = StatePlanner()
    save = PendingSave(Path(folder), planner, planner.stage(sharded_state(model, optimizer)))
    assert save.poll(timeout=600.0), "the writer took more than ten minutes"
    assert save.problem is None, save.problem
    written = save.gather()
    first_rank(lambda: save.finish(written, extra))


def reseal(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change meta.json and update its hash."""
    meta = json.loads((folder / "meta.json").read_text())
    change(meta)
    text = json.dumps(meta)
    (folder / "meta.json").write_text(text)
    (folder / "COMPLETE").write_text(hashlib.sha256(text.encode()).hexdigest())
