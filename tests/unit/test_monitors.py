"""Monitors in whole runs of one process: they change nothing, and each sampled step is one line."""

import json
import math
from pathlib import Path

import pytest

from tests.run_configs import read_config, tiny_config
from tests.token_files import write_token_set
from training import monitor_figures as figures
from training.config import Config
from training.run import train
from training.run_log import drop_later_lines


@pytest.fixture
def folder(tmp_path):
    """A folder with a token set."""
    write_token_set(tmp_path / "tokens", tokens=8_000, vocab=120, seed=0)
    return str(tmp_path)


def losses(config: Config, world) -> list[float]:
    """The loss of every step of a run."""
    found: list[float] = []
    train(config, world, on_step=lambda _, result: found.append(result.loss.item()))
    return found


def lines(folder: str, name: str = "monitors.jsonl") -> list[dict]:
    """The lines of a file of the run."""
    return [json.loads(line) for line in (Path(folder) / "run" / name).read_text().splitlines()]


def test_a_run_is_bit_for_bit_the_same_with_monitors(folder, world):
    curves = [
        losses(tiny_config(folder, "muon_sphere", monitors__interval=k, train__exit_step=6), world)
        for k in (0, 1, 3)
    ]
    assert curves[0] == curves[1] == curves[2]


def test_a_sampled_step_is_a_line_and_its_aggregates_are_metrics(folder, world):
    config = tiny_config(folder, monitors__interval=2, train__exit_step=5)
    train(config, world)
    found = lines(folder)
    assert [line["step"] for line in found] == [2, 4]
    line = found[-1]
    assert line["tokens"] == 4 * 8 * 32
    gate = line["units"]["layers.1.gate"]
    assert (gate["role"], gate["layer"]) == ("gate", 1)
    assert gate["radius"] == pytest.approx(math.sqrt(96 / 64))
    assert gate["retraction_bias"] == pytest.approx(gate["tracked_norm"] / gate["radius"] - 1)
    assert len(gate["quantiles"]) == 11 and gate["quantiles"][-1] == gate["spectral_norm"]
    assert line["units"]["embedding"]["layer"] is None
    assert line["units"]["embedding"]["update_rms"] > 0
    metrics = {row["step"]: row for row in lines(folder, "metrics.jsonl")}
    assert sorted(metrics) == [2, 4, 5]  # the log's own interval is 5
    gates = [unit["stable_rank"] for unit in line["units"].values() if unit["role"] == "gate"]
    assert metrics[4]["monitor/stable_rank/gate"] == pytest.approx(sum(gates) / 2)
    layer = [u["condition_number"] for u in line["units"].values() if u["layer"] == 0]
    mean = line["layers"]["0"]["condition_number"]
    assert mean == pytest.approx(sum(layer) / len(layer))
    inside = [u["condition_number"] for u in line["units"].values() if u["layer"] is not None]
    logs = sum(map(math.log, inside)) / len(inside)
    name = "monitor/condition_number/geometric_mean"
    assert metrics[4][name] == pytest.approx(math.exp(logs))
    assert not any(key.startswith("monitor/") for key in metrics[5])


def test_a_continued_run_writes_no_step_twice(folder, world):
    keys = {"monitors__interval": 1, "checkpoint__interval": 3}
    train(tiny_config(folder, train__exit_step=5, **keys), world)
    whole = lines(folder)
    # As if it had been killed after step 5, with a checkpoint of step 3 alone.
    train(read_config(folder, train__exit_step=5, **keys), world, resume="3")
    again = lines(folder)
    assert [line["step"] for line in again] == [1, 2, 3, 4, 5]
    assert again[:3] == whole[:3] and again[4] == whole[4]
    drop_later_lines(Path(folder) / "run" / "monitors.jsonl", 2)
    assert len(lines(folder)) == 2


def test_groups_choose_what_is_looked_at(folder, world):
    config = tiny_config(
        folder, monitors__interval=1, train__exit_step=1, monitors__groups="[gradients]"
    )
    train(config, world)
    (line,) = lines(folder)
    gate = line["units"]["layers.1.gate"]
    assert "gradient_rms" in gate and "stable_rank" not in gate and "applied_rms" not in gate


def test_means_leave_out_what_is_not_finite():
    records = [
        {"role": "q", "layer": 0, "condition_number": 2.0, "quantiles": [1.0]},
        {"role": "q", "layer": 1, "condition_number": math.inf},
        {"role": "q", "layer": 1, "condition_number": 8.0},
    ]
    assert figures.role_means(records) == {"monitor/condition_number/q": 5.0}
    assert figures.layer_means(records) == {
        "0": {"condition_number": 2.0},
        "1": {"condition_number": 8.0},
    }
    assert figures.global_figures(records, ["q"]) == {
        "monitor/condition_number/geometric_mean": pytest.approx(4.0)
    }
