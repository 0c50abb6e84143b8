"""A run takes deterministic kernels where its config asks for them, and leaves no trace of it."""

import pytest
import torch

from parallel.comm.groups import Groups
from tests.run_configs import tiny_config
from training.run import train


@pytest.mark.parametrize("wanted", [True, False])
def test_a_run_is_deterministic_if_its_config_says_so(
    wanted: bool, world: Groups, folder: str
) -> None:
    config = tiny_config(
        folder, "adamw", run__deterministic=wanted, train__exit_step=2, validation__samples=2
    )
    seen = []
    train(
        config, world, on_step=lambda *_: seen.append(torch.are_deterministic_algorithms_enabled())
    )
    assert seen == [wanted, wanted]
    assert not torch.are_deterministic_algorithms_enabled()
