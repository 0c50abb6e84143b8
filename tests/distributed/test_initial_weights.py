"""Ranks with the same matrices share the work of their initial norms."""

import pytest

from tests.families import overrides, settings
from tests.launch import run_on_ranks
from tests.run_configs import tiny_config
from training.checkpoint.files import step_folder
from training.run import train

WORKERS = "tests.distributed.initial_weights_workers"


@pytest.mark.parametrize("family", ["llama", "moe"])
def test_every_norm_is_computed_by_one_rank(family, folder):
    """Every norm on every rank took minutes for models of a billion parameters."""
    changes = overrides(settings(family)) | {"model__init__spectral": True}
    tiny_config(folder, **changes)
    found = run_on_ranks(2, WORKERS, "normalised", {"folder": folder, "changes": changes})
    shares = [set(each["computed"]) for each in found]
    assert not shares[0] & shares[1]
    assert sum(len(each["computed"]) for each in found) == len(shares[0] | shares[1])
    for each in found:
        assert shares[0] | shares[1] == set(each["needed"])
    assert abs(len(shares[0]) - len(shares[1])) <= 1


def test_ranks_take_the_weights_of_one_checkpoint_of_a_run_that_goes_on(folder, world):
    keys = {"train__steps": 4, "checkpoint__interval": 2, "run__dir": f"{folder}/old"}
    train(tiny_config(folder, "muon", **keys), world)
    step_folder(f"{folder}/old", 4).rename(f"{folder}/hidden")
    assert run_on_ranks(2, WORKERS, "chosen", {"folder": folder}) == [2, 2]
