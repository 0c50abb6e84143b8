"""A plan and a rehearsal of one config use one model of time, and count nearly equal work."""

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
"""Name, GPUs, and overrides: fewer layers of the same sizes."""
WHOLE = ("llama1b_sso", 8, list[str]())


@pytest.mark.usefixtures("perform")
@pytest.mark.parametrize(("name", "gpus", "changes"), slow_but(RECIPES[:1], [*RECIPES, WHOLE]))
def test_a_step_takes_as_long_in_a_plan_as_in_a_rehearsal(name, gpus, changes) -> None:
    keys = [*changes, "monitors.interval=0", "checkpoint.interval=0"]
    config = load_config(ROOT / "configs" / f"{name}.yaml", keys)
    report = rehearse(on_mock_tokens(config), gpus, device_named("h100"))
    assert report.error is None
    assert report.planned_seconds == pytest.approx(report.modelled_seconds, rel=0.05)
