"""The disk space that a plan shows for checkpoints."""

from pathlib import Path

import pytest

from tests.run_configs import tiny_config
from training.planning.plan_screen import checkpoint_bytes, checkpoints_text
from training.run import train

WIDE = {"model__hidden": 256, "model__ffn": 768, "checkpoint__interval": 1}
"""A model that is large enough for the names in a checkpoint file to be small compared with the
tensors."""
SHORT = {"train__exit_step": 1, "train__global_batch": 2, "validation__samples": 1}
WITH_PC = {"pc__level": 2}
HALF_MOMENTUM = {"optimizer__distributed__momentum_dtype": "bf16"}


@pytest.mark.parametrize(
    ("rule", "keys"),
    [
        ("adamw", {}),
        ("muon", {}),
        ("spectral_sphere", {}),
        ("muon", WITH_PC),
        ("muon", HALF_MOMENTUM),
        ("muon", WITH_PC | HALF_MOMENTUM),
    ],
)
def test_a_saved_state_is_as_large_as_planned(rule, keys, folder, world):
    config = tiny_config(folder, rule, **WIDE, **SHORT, **keys)
    train(config, world)
    state = Path(folder) / "run" / "checkpoints" / "step_00000001" / "state"
    size = sum(each.stat().st_size for each in state.rglob("*") if each.is_file())
    assert size == pytest.approx(checkpoint_bytes(config), rel=0.05)


@pytest.mark.parametrize(
    ("keys", "number"),
    [
        ({"checkpoint__interval": 3}, 3),  # of 3, 6, ..., 18, 20
        ({"checkpoint__interval": 3, "checkpoint__keep_last": "null"}, 7),
        ({"checkpoint__interval": 3, "checkpoint__keep_every": 6}, 5),  # 6, 12, and 15, 18, 20
        ({"checkpoint__interval": 3, "train__exit_step": 4}, 2),
        ({"checkpoint__interval": 30}, 1),
        ({"checkpoint__interval": 20, "checkpoint__keep_last": 5}, 1),
    ],
)
def test_kept_checkpoints_are_counted(keys, number, folder):
    config = tiny_config(folder, "muon", **keys)
    text = checkpoints_text(config)
    total = checkpoint_bytes(config) / 1e9 * number
    assert f"; {number} checkpoints are kept and need {total:.3g} GB" in text, text


def test_a_run_that_never_saves(folder):
    assert checkpoints_text(tiny_config(folder, "muon")).startswith("none: ")
