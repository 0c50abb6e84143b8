"""A plan and a rehearsal of one config have one model of time, and count nearly the same work."""

import pytest

from parallel.plan.devices import device_named
from tests.paths import ROOT
from training.build import on_mock_tokens
from training.config import load_config
from training.rehearsal.processes import Processes
from training.rehearsal.rehearse import rehearse

TWO_BY_TWO = ["parallel.tensor=2", "parallel.pipeline=2"]
RECIPES = [("llama1b_sso", 8, []), ("llama8b_sso", 64, TWO_BY_TWO), ("moe_8b_a1b_sso", 64, [])]
SHORT = {
    "llama1b_sso": ["model.layers=3"],
    "llama8b_sso": ["model.layers=8"],
    "moe_8b_a1b_sso": ["model.layers=3"],
}
"""Fewer layers of the same sizes."""


@pytest.mark.parametrize(
    ("name", "gpus", "layout", "whole"),
    [(*recipe, False) for recipe in RECIPES]
    + [pytest.param(*recipe, True, marks=pytest.mark.slow) for recipe in RECIPES],
)
def test_a_step_takes_as_long_in_a_plan_as_in_a_rehearsal(
    name: str, gpus: int, layout: list[str], whole: bool, processes: Processes
) -> None:
    keys = [*layout, *([] if whole else SHORT[name]), "monitors.interval=0"]
    config = load_config(ROOT / "configs" / f"{name}.yaml", [*keys, "checkpoint.interval=0"])
    report = rehearse(on_mock_tokens(config), gpus, device_named("h100"), processes=processes)
    assert report.error is None
    assert report.planned_seconds == pytest.approx(report.seconds, rel=0.05)
