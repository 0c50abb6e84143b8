"""Results of the papers' tiny runs: what is read and quoted, and what verdicts rest on."""

import dataclasses
import json
import shlex
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

from scripts.paper import main
from scripts.papers.catalogue import Item, read_catalogue
from scripts.papers.figure import draw, figure_file
from scripts.papers.measured import (
    Measure,
    holds,
    measure,
    read_numbers,
    study_command,
    study_file,
    to_json,
)
from scripts.plots.style import save
from scripts.studies.schema import read_study
from tests.paths import ROOT
from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from training.config import load_config
from training.errors import InputError
from training.run import train

MEASURED = [
    pytest.param(item, id=f"{name} {key}")
    for name, paper in read_catalogue().items()
    for key, item in paper.items.items()
    if item.measure is not None and item.status != "not run"
]


@pytest.mark.parametrize("item", MEASURED)
def test_a_verdict_rests_on_what_the_paper_states(item: Item) -> None:
    """A statement that fails is no reproduction; one that holds may still decide nothing."""
    assert item.file is not None and item.holds
    numbers = read_numbers(ROOT / item.file)
    found = [holds(statement, numbers) for statement in item.holds]
    assert item.status != "reproduced" or all(found), dict(zip(item.holds, found, strict=True))
    assert item.status != "contradicts" or not all(found)


@pytest.mark.parametrize("item", MEASURED)
def test_results_are_those_of_the_commands_of_the_row(item: Item) -> None:
    assert item.file is not None and item.measure is not None
    content = json.loads((ROOT / item.file).read_text())
    assert content.keys() == item.measure.runs.keys()
    assert to_json(content) == (ROOT / item.file).read_text()
    assert "{" not in str(item.shown_result())
    if item.measure.study is not None:
        command = study_command(item.measure, item.tiny)
        study = read_study(study_file(command))
        for name, found in content.items():
            assert (found["command"], found["variant"]) == (command, item.measure.runs[name])
            assert study.variants[found["variant"]].against == found["against"]
            assert len(found["losses"]) == len(found["runs_sha256"]) == len(study.seeds)
            assert found["loss"] == pytest.approx(statistics.fmean(found["losses"]))
        return
    for name, run in content.items():
        assert run["command"] in item.tiny
        assert f"run.dir={item.measure.runs[name]}" in shlex.split(run["command"])
        assert run["series"].keys() == item.measure.series.keys()
        assert len(run["config_sha256"]) == 64 and len(run["versions"]["commit"]) == 40
        config = ROOT / shlex.split(run["command"])[3]
        overrides = shlex.split(run["command"])[4:]
        train_config = load_config(config, overrides).train
        assert run["steps"] == (train_config.exit_step or train_config.steps)
        assert all(max(map(int, each)) <= run["steps"] for each in run["series"].values())


@pytest.mark.parametrize("item", MEASURED)
def test_figures_are_those_of_the_results(item: Item, tmp_path: Path) -> None:
    ((paper, key),) = [
        (name, key)
        for name, paper in read_catalogue().items()
        for key, each in paper.items.items()
        if each == item
    ]
    save(draw(item), tmp_path / "again.svg")
    committed = (ROOT / figure_file(paper, key)).read_text()
    if f"Matplotlib v{mpl.__version__}," not in committed:
        pytest.skip("the figure was drawn by another version of matplotlib")
    assert (tmp_path / "again.svg").read_text() == committed


def test_statements_are_comparisons_of_products() -> None:
    numbers = {"a": {"x": {"last": 2.0}}, "b": {"x": {"last": 3.0}}}
    assert holds("{a[x][last]} < {b[x][last]}", numbers)
    assert not holds("2 * {a[x][last]} < {b[x][last]}", numbers)
    assert holds("1 < {a[x][last]} < {b[x][last]}", numbers)
    assert not holds("1 < {b[x][last]} < {a[x][last]}", numbers)
    with pytest.raises(KeyError):
        holds("{c[x][last]} < 1", numbers)


def test_statistics_are_those_of_the_series(tmp_path: Path) -> None:
    series = {str(10 * n + 10): float(n) for n in range(10)}
    (tmp_path / "a.json").write_text(to_json({"run": {"series": {"x": series}}}))
    assert read_numbers(tmp_path / "a.json")["run"]["x"] == {
        "first": 0, "last": 9, "least": 0, "greatest": 9,
        "mean": 4.5, "median": 4.5, "early": 0.5, "settled": 7,
    }  # fmt: skip


@pytest.fixture
def finished(world: Any, tmp_path: Path) -> tuple[str, str]:
    """The folder and the command of a finished run with PC layers."""
    write_token_set(tmp_path / "tokens", tokens=8_000, vocab=120, seed=0)
    keys = {"pc__level": 4, "train__steps": 3, "checkpoint__interval": 3}
    keys |= {"monitors__interval": 1, "log__interval": 1}
    train(tiny_config(str(tmp_path), "muon", **keys), world)
    overrides = " ".join(f"{key.replace('__', '.')}={value}" for key, value in keys.items())
    return f"{tmp_path}/run", f"python pretrain.py --config {tmp_path}/config.yaml {overrides}"


def test_series_are_the_figures_that_the_run_logged(finished: tuple[str, str]) -> None:
    folder, command = finished
    texts = {
        "loss": "metric train/loss",
        "mean": "mean stable_rank down",
        "mean of all": "metric monitor/stable_rank/down",
        "largest": "largest residual_rms blocks",
        "largest of all": "metric monitor/residual_rms/max",
        "second": "mean stable_rank down 1",
        "least": "least quantile_50 o",
        "top": "mean quantile_100 o",
    }
    found = measure(Measure(runs={"a": folder}, series=texts), [command])["a"]
    assert found["command"] == command and found["steps"] == 3
    series = found["series"]
    assert [*series["loss"]] == [1, 2, 3]
    assert series["mean"] == series["mean of all"]
    assert series["largest"] == series["largest of all"]
    assert set(series["top"].values()) == {1.0}
    lines = [json.loads(line) for line in Path(folder, "monitors.jsonl").read_text().splitlines()]
    for line in lines:
        units, step = line["units"], line["step"]
        down = units["layers.1.down"]["stable_rank"]
        assert series["second"][step] == pytest.approx(down, rel=1e-4)  # five digits are kept
        medians = [
            unit["effective_quantiles"][5] / unit["effective_quantiles"][10]
            for unit in units.values()
            if unit["role"] == "o"
        ]
        assert series["least"][step] == pytest.approx(min(medians), rel=1e-4)


def test_a_run_of_another_config_or_length_is_refused(finished: tuple[str, str]) -> None:
    folder, command = finished
    what = Measure(runs={"a": folder}, series={"loss": "metric train/loss"})
    with pytest.raises(InputError, match="must have the config of its command"):
        measure(what, [f"{command} pc.level=2"])
    unknown = dataclasses.replace(what, series={"x": "mean nothing down"})
    with pytest.raises(InputError, match="figures for `mean nothing down`, got none"):
        measure(unknown, [command])
    other = dataclasses.replace(what, runs={"a": f"{folder}_2"})
    with pytest.raises(InputError, match="must be a finished run, run: python pretrain.py"):
        measure(other, [f"{command} run.dir={folder}_2"])
    with pytest.raises(ValueError, match="must be `metric NAME` or `OVER FIGURE ROLE`"):
        Measure(series={"x": "greatest loss down"})


def test_an_item_without_measure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pc_layer", "figure_1", "--measure"]) == 2
    assert "--measure has nothing to read" in capsys.readouterr().err
