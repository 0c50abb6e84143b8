"""The papers' experiments run at a small size, and a wrong number fails."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts.experiments import pi_bound, rank_growth
from scripts.experiments.check import Check, at_least, at_most, bounds, near
from scripts.experiments.experiment import Result, perform, result_of
from scripts.experiments.registry import EXPERIMENTS
from scripts.experiments.regression import descend
from scripts.experiments.report import markdown, rows, text
from scripts.reproduce import main, parse
from tests.paths import ROOT

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "reproduce.md").read_text()


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


def test_a_check_is_a_range() -> None:
    assert Check("", 1.0, 1.0, 2.0, "").passed and Check("", 2.0, 1.0, 2.0, "").passed
    assert not Check("", 0.999, 1.0, 2.0, "").passed and not Check("", 2.001, 1.0, 2.0, "").passed
    assert not Check("", math.nan, -math.inf, math.inf, "").passed
    assert at_least("", 3, 3, "").passed and not at_least("", 2.9, 3, "").passed
    assert at_most("", 3, 3, "").passed and not at_most("", 3.1, 3, "").passed
    assert near("", -1.05, -1, 0.06, "").passed and not near("", -1.05, -1, 0.04, "").passed


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


def test_what_cannot_be_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["relu_feature", "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: experiments must be among") and "relu_features?" in error
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    assert main(["pi_bound", "--output", str(tmp_path / "file")]) == 2


def test_a_table_shows_the_worst_of_a_series_and_all_that_failed() -> None:
    series = [near(f"n{i}", 1 + i / 10, 1, 0.5, "paper", "n") for i in range(4)]
    result = Result("name", [*series, at_most("alone", 2, 3, "theory")], 1.0)
    lines = list(rows(result))
    assert [row[1] for row in lines] == ["4 numbers; worst: n3", "alone"]
    assert lines[0][2:] == ("1.3", "0.5 to 1.5", "paper", "pass")
    wrong = replace(result, checks=[*series, near("n9", 2, 1, 0.5, "paper", "n")])
    assert [(row[1], row[5]) for row in rows(wrong)] == [("n9", "FAIL")]
    assert wrong.failed == 1
    assert "| alone | 2 | <= 3 | theory | pass |" in markdown([result])
    assert len(text([result]).splitlines()) == 3


def test_the_script_names_its_experiments(root: Path) -> None:
    command = [sys.executable, str(root / "scripts" / "reproduce.py"), "--list"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split(":")[0] for line in out.splitlines()] == list(EXPERIMENTS)


def test_the_page_has_a_command_for_every_experiment() -> None:
    commands = re.findall(r"python scripts/reproduce\.py (.*)$", PAGE, re.MULTILINE)
    named = [name for command in commands for name in parse(command.split("`")[0].split()).names]
    assert sorted(set(named)) == sorted(EXPERIMENTS)


@pytest.mark.parametrize("model", rank_growth.MODELS)
def test_gradients_in_closed_form_are_those_of_descent(model: str) -> None:
    task = rank_growth.problem(24, model, seed=1)
    keep = (0, 1, 2, 7)
    weights = descend(task, 8, spectral=False, keep=keep).weights
    closed = rank_growth.gradients(task, keep)
    n = task.a.shape[1]
    for found, weight in zip(closed, weights.values(), strict=True):
        expected: Tensor = (weight @ task.a - task.y) @ task.a.mT / n
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_the_committed_table_is_that_of_the_committed_results(root: Path) -> None:
    folder = root / "benchmarks" / "results"
    results = [result_of(entry) for entry in json.loads((folder / "reproduce.json").read_text())]
    assert (folder / "reproduce.md").read_text() == markdown(results)
    assert {result.name for result in results} <= set(EXPERIMENTS)


def test_the_figures_of_the_page_are_there_and_small(root: Path) -> None:
    named = re.findall(r"\]\((images/reproduce_\w+\.png)\)", PAGE)
    assert 0 < len(named) <= 5
    for name in named:
        assert 5_000 < (root / "docs" / name).stat().st_size < 150_000


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_published_numbers_hold(name: str, tmp_path: Path) -> None:
    result = perform(EXPERIMENTS[name], tmp_path, seed=None, small=False, suffix=".svg")
    assert not [check for check in result.checks if not check.passed]
