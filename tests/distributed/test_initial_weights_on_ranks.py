"""Ranks with the same matrices divide the work of computing the initial norms."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from models import initialize
from models.units import Unit
from parallel.comm import groups as process_groups
from tests.launch import run_on_ranks
from tests.run_configs import read_config, tiny_config
from tests.tiny_families import overrides, settings
from training.build import build_trainer
from training.checkpoint import checkpoints
from training.checkpoint import initial_weights as initial
from training.checkpoint.stored_checkpoint import CheckpointInfo
from training.data.build_data import build_data
from training.run import train


def normalised(folder: str, changes: dict[str, Any]) -> dict[str, list[str]]:
    """For a new model, return the matrices whose norms this rank computes, and all matrices whose
    norms this rank needs."""
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
    """Return the step whose weights this rank loads from the run FOLDER/old while that run saves a
    newer checkpoint."""
    groups = process_groups.initialize()
    config = read_config(folder, checkpoint__initialize_from=f"{folder}/old")
    newer = checkpoints.step_folder(f"{folder}/old", 4)
    read = initial.read_checkpoint

    def read_before_the_save(path: str) -> CheckpointInfo:
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


@pytest.mark.parametrize("family", ["llama", "moe"])
def test_every_norm_is_computed_by_one_rank(family, folder):
    """With a billion parameters, computing every norm on every rank would take minutes."""
    changes = overrides(settings(family)) | {"model__init__spectral": True}
    tiny_config(folder, **changes)
    found = run_on_ranks(2, __name__, "normalised", {"folder": folder, "changes": changes})
    shares = [set(each["computed"]) for each in found]
    assert not shares[0] & shares[1]
    assert sum(len(each["computed"]) for each in found) == len(shares[0] | shares[1])
    for each in found:
        assert shares[0] | shares[1] == set(each["needed"])
    assert abs(len(shares[0]) - len(shares[1])) <= 1


def test_ranks_take_the_weights_of_one_checkpoint_of_a_run_that_goes_on(folder, world):
    keys = {"train__steps": 4, "checkpoint__interval": 2, "run__dir": f"{folder}/old"}
    train(tiny_config(folder, "muon", **keys), world)
    checkpoints.step_folder(f"{folder}/old", 4).rename(f"{folder}/hidden")
    assert run_on_ranks(2, __name__, "chosen", {"folder": folder}) == [2, 2]
