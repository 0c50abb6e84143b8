"""What is read of the papers' tiny runs is what they logged."""

from typing import Any

from scripts.papers.measured import Measure, measure, statistics_of
from tests.run_configs import tiny_config
from training.run import train


def test_statistics_are_those_of_the_series() -> None:
    assert statistics_of({str(10 * n + 10): float(n) for n in range(10)}) == {
        "first": 0, "last": 9, "least": 0, "greatest": 9,
        "mean": 4.5, "median": 4.5, "early": 0.5, "settled": 7,
    }  # fmt: skip


def test_series_are_the_figures_that_the_run_logged(world: Any, folder: str) -> None:
    """Of a run with PC layers."""
    keys = {"pc__level": 4, "train__steps": 3, "checkpoint__interval": 3}
    keys |= {"monitors__interval": 1, "log__interval": 1}
    train(tiny_config(folder, "muon", **keys), world)
    overrides = " ".join(f"{key.replace('__', '.')}={value}" for key, value in keys.items())
    command = f"python pretrain.py --config {folder}/config.yaml {overrides}"
    texts = {
        "loss": "metric train/loss",
        "mean": "mean stable_rank down",
        "mean of all": "metric monitor/stable_rank/down",
        "largest": "largest residual_rms blocks",
        "largest of all": "metric monitor/residual_rms/max",
        "top": "mean quantile_100 o",
    }
    found = measure(Measure(runs={"a": f"{folder}/run"}, series=texts), [command])["a"]
    assert found["command"] == command and found["steps"] == 3
    series = found["series"]
    assert [*series["loss"]] == [1, 2, 3]
    assert series["mean"] == series["mean of all"]
    assert series["largest"] == series["largest of all"]
    assert set(series["top"].values()) == {1.0}
