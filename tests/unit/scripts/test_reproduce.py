"""The papers' experiments run at a small size, and a wrong number fails."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.experiments import pi_bound
from scripts.experiments.check import bounds
from scripts.experiments.experiment import perform, result_of
from scripts.experiments.registry import EXPERIMENTS
from scripts.reproduce import main

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_properties_hold_at_a_small_size(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    result = perform(experiment, tmp_path, seed=None, small=True, suffix=".svg")
    assert not [check for check in result.checks if not check.passed]
    content = json.loads((tmp_path / f"{name}.json").read_text())
    assert content["passed"] and not content["published_setting"]
    assert content["settings"]["seed"] == experiment.seed
    assert {"python", "torch"} <= content["versions"].keys()
    assert len(content["checks"]) == len(result.checks) >= 3
    for check, stored in zip(result.checks, content["checks"], strict=True):
        assert stored["measured"] == check.measured and stored["source"]
    assert list(result_of(content).checks) == list(result.checks)
    # Drawn again from what the file holds, it is the same figure.
    redrawn = experiment.draw(content["data"])
    assert [a.get_title() for a in redrawn.axes]
    assert (tmp_path / f"{name}.svg").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("number", "inside", "outside"),
    [("4.22e-3", 4.229e-3, 4.231e-3), ("27.47", 27.461, 27.459), ("50", 49.1, 48.9)],
)
def test_a_printed_number_is_known_to_its_last_digit(
    number: str, inside: float, outside: float
) -> None:
    low, high = bounds(number)
    assert low <= inside <= high and not low <= outside <= high


def test_a_wrong_number_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pi_bound, "BOUND", 3.0)
    assert main(["pi_bound", "--small", "--output", str(tmp_path)]) == 1
    assert "FAIL" in capsys.readouterr().out
    assert not json.loads((tmp_path / "pi_bound.json").read_text())["passed"]
    (summary,) = json.loads((tmp_path / "results.json").read_text())
    wrong = [check for check in summary["checks"] if not check["passed"]]
    assert [check["high"] for check in wrong] == [3.0] and wrong[0]["measured"] > 3.0
    assert "| FAIL |" in (tmp_path / "table.md").read_text()


def test_a_wrong_published_number_fails_at_the_published_size(tmp_path: Path) -> None:
    # The reduced shapes made the published ones, whose numbers they do not have.
    shapes = ((16, 8, 32), (20, 10, 40), (32, 16, 64), (40, 20, 80), (64, 32, 128))
    experiment = replace(pi_bound.EXPERIMENT, full=pi_bound.Sizes(shapes))
    result = perform(experiment, tmp_path, seed=None, small=False, suffix=".svg")
    assert {check.series for check in result.checks if not check.passed} == {"stable_rank"}
    # Another seed has no published numbers.
    other = perform(experiment, tmp_path, seed=5, small=False, suffix=".svg")
    assert not [check for check in other.checks if check.source == "recorded"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_published_numbers_hold(name: str, tmp_path: Path) -> None:
    result = perform(EXPERIMENTS[name], tmp_path, seed=None, small=False, suffix=".svg")
    assert not [check for check in result.checks if not check.passed]
