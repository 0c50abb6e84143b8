"""A run takes deterministic kernels where its config asks for them, and leaves no trace of it."""

from pathlib import Path

import pytest
import torch
from torch.utils import deterministic

from parallel.comm.groups import Groups
from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from training.machine.repeatable import repeatable
from training.run import train


@pytest.mark.parametrize("wanted", [True, False])
def test_a_run_is_deterministic_if_its_config_says_so(
    wanted: bool, world: Groups, tmp_path: Path
) -> None:
    write_token_set(tmp_path / "tokens", tokens=2_000, vocab=120, seed=0)
    config = tiny_config(
        str(tmp_path), "adamw", run__deterministic=wanted, train__exit_step=2, validation__samples=2
    )
    seen = []
    train(
        config, world, on_step=lambda *_: seen.append(torch.are_deterministic_algorithms_enabled())
    )
    assert seen == [wanted, wanted]
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_the_process_has_set_comes_back() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with repeatable(True):
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            assert not deterministic.fill_uninitialized_memory
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
