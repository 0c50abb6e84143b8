"""Read the output of a run: lines, metrics and checkpoints."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.checkpoint.checkpoints import read_checkpoint, step_folder
from training.checkpoint.stored_checkpoint import CheckpointInfo, StoredTensors
from training.report.log_lines import read_metrics


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of all files by name, except for the lock, which names the last process."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def without_times(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics in a line that are the same in every run of the same steps."""
    return {k: v for k, v in line.items() if not k.startswith(("perf/", "progress/eta"))}


def metrics_of(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, without times."""
    return [without_times(line) for line in read_metrics(run_dir)]


def state_of(run_dir: str | Path, step: int) -> dict[str, Tensor]:
    """Return all unsharded tensors in the checkpoint at `step`."""
    return tensors_of(read_checkpoint(step_folder(run_dir, step)))


def tensors_of(info: CheckpointInfo, prefix: str = "") -> dict[str, Tensor]:
    """Return the unsharded tensors in a checkpoint whose keys start with `prefix`."""
    stored = StoredTensors(info.state)
    return stored.read(stored.keys(prefix))


def same_state(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that are not bitwise identical."""
    assert ours.keys() == theirs.keys() and ours
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]
