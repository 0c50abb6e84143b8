"""What the ranks of the tests of initial weights run."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from models import initialize
from models.units import Unit
from parallel.comm import groups as process_groups
from tests.run_configs import read_config
from training.build import build_data, build_trainer
from training.checkpoint import files as checkpoint
from training.checkpoint import initial_weights as initial


def normalised(folder: str, changes: dict[str, Any]) -> dict[str, list[str]]:
    """The matrices whose norms this rank computes when a model is built, and all whose norms it
    needs."""
    groups = process_groups.initialize()
    config = read_config(folder, **changes)
    real, computed = initialize.spectral_norms, []

    def spectral_norms(units: Sequence[Unit], *arguments: Any, **options: Any) -> torch.Tensor:
        computed.extend(unit.name for unit in units)
        return real(units, *arguments, **options)

    initialize.spectral_norms = spectral_norms
    trainer = build_trainer(config, groups, *build_data(config))
    needed = [
        unit.name
        for domain in trainer.model.domains
        for unit in domain.units
        if unit.is_matrix and unit.role not in initialize.VOCABULARY
    ]
    process_groups.shutdown()
    return {"computed": computed, "needed": needed}


def chosen(folder: str) -> int:
    """The step whose weights this rank takes from FOLDER/old, which saves another meanwhile."""
    groups = process_groups.initialize()
    config = read_config(folder, checkpoint__initialize_from=f"{folder}/old")
    newer = checkpoint.step_folder(f"{folder}/old", 4)
    read = initial.read_checkpoint

    def read_before_the_save(path: str) -> checkpoint.CheckpointInfo:
        found = read(path)
        Path(f"{folder}/hidden").rename(newer)
        return found

    if groups.rank == 0:
        initial.read_checkpoint = read_before_the_save
    while groups.rank > 0 and not newer.exists():
        time.sleep(0.01)
    weights = initial.initial_weights(config)
    process_groups.shutdown()
    assert weights is not None
    return weights.info.step
