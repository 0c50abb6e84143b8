"""A plan and a rehearsal of the same config use the same time model and count nearly equal work."""

import pytest

from tests.paths import ROOT
from tests.slow_cases import slow_but
from training.config import load_config
from training.data.build_data import on_mock_tokens
from training.dry_run import device_named
from training.rehearsal.rehearse import rehearse

TWO_BY_TWO = ["parallel.tensor=2", "parallel.pipeline=2"]
RECIPES = [
    ("llama1b_sso", 8, ["model.layers=3"]),
    ("llama8b_sso", 64, ["model.layers=8", *TWO_BY_TWO]),
    ("moe_8b_a1b_sso", 64, ["model.layers=3"]),
]
"""Recipe name, number of GPUs, and overrides, which reduce the number of layers but not their size.
"""
WHOLE = ("llama1b_sso", 8, list[str]())


@pytest.mark.usefixtures("perform")
@pytest.mark.parametrize(("name", "gpus", "changes"), slow_but(RECIPES[:1], [*RECIPES, WHOLE]))
def test_a_step_takes_as_long_in_a_plan_as_in_a_rehearsal(name, gpus, changes) -> None:
    keys = [*changes, "monitors.interval=0", "checkpoint.interval=0"]
    config = load_config(ROOT / "configs" / f"{name}.yaml", keys)
    report = rehearse(on_mock_tokens(config), gpus, device_named("h100"))
    assert report.error is None
    assert report.planned.time.total == pytest.approx(report.modelled_seconds, rel=0.05)
