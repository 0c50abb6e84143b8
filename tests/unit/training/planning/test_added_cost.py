"""By default, monitors cost at most 1% of the run time, according to the time model of plans."""

from dataclasses import replace

import pytest
import torch

from models.families import all_units
from tests.paths import ROOT
from training.config import load_config
from training.data.build_data import on_mock_tokens
from training.dry_run import device_named, gpu_hours, plan_run, step_shape
from training.planning import added_cost as cost

RUNS = [
    ("llama1b_muon", 1, ["train.micro_batch=2", "train.global_batch=16"]),
    ("llama1b_muon", 8, []),
    ("llama1b_sso", 64, ["train.micro_batch=5"]),
    ("moe_8b_a1b_sso", 64, []),
]


def cost_of(name, gpus, overrides):
    config = on_mock_tokens(load_config(ROOT / f"configs/{name}.yaml", overrides))
    return cost.planned_cost(config, plan_run(config, gpus, device_named("h200")))


@pytest.mark.parametrize(("name", "gpus", "overrides"), RUNS)
def test_the_default_interval_costs_a_hundredth_at_most(name, gpus, overrides):
    found = cost_of(name, gpus, overrides)
    assert found.interval % 100 == 0 and 0 < found.share <= 0.01
    # The next smaller multiple would cost more, unless there is none.
    assert found.interval == 100 or found.share * found.interval / (found.interval - 100) > 0.01
    fixed = cost_of(name, gpus, [*overrides, "monitors.interval=100"])
    assert fixed.share == pytest.approx(found.share * found.interval / 100)


def test_a_group_that_is_not_chosen_costs_nothing():
    every = cost_of(*RUNS[0]).seconds
    spent = [every]
    for groups in ("weights,gradients,updates", "weights,gradients", "weights", "attention"):
        name, gpus, overrides = RUNS[0]
        spent.append(cost_of(name, gpus, [*overrides, f"monitors.groups=[{groups}]"]).seconds)
    assert spent == sorted(spent, reverse=True) and spent[-1] < every / 10


def test_the_cost_of_inputs_and_scores_is_shared_by_the_ranks_of_a_pipeline_and_of_sequences():
    name, gpus, overrides = RUNS[0]
    config = on_mock_tokens(load_config(ROOT / f"configs/{name}.yaml", overrides))
    shape = step_shape(config, gpus, device_named("h200"))
    units = all_units(config.model)
    inputs, scores = cost.input_seconds(shape, units), cost.score_seconds(shape)
    for changes in ({"pipeline": 2}, {"context": 2}):
        other = replace(shape, inputs=replace(shape.inputs, **changes))
        found = [cost.input_seconds(other, units), cost.score_seconds(other)]
        assert found == pytest.approx([inputs / 2, scores / 2])
    other = replace(shape, inputs=replace(shape.inputs, tensor=2))
    assert cost.score_seconds(other) == pytest.approx(scores / 2)
    other = replace(shape, microbatches=3 * shape.microbatches)
    found = [cost.input_seconds(other, units), cost.score_seconds(other)]
    assert found == pytest.approx([3 * inputs, 3 * scores], rel=1e-3)
    # Inputs of one parameter are multiplied once for all of its matrices.
    parameters = {unit.parameter: unit for unit in units}.values()
    assert cost.input_seconds(shape, [*parameters]) == inputs


def test_a_cpu_and_monitors_that_are_off_need_no_plan(monkeypatch):
    monkeypatch.delattr(cost, "plan_run")
    config = on_mock_tokens(load_config(ROOT / "configs/tiny_muon.yaml", []))
    found = cost.monitor_cost(config, 2, torch.device("cpu"))
    assert found == cost.MonitorCost(100) and "twice as long" in str(found)
    off = replace(config, monitors=replace(config.monitors, interval=0))
    assert cost.monitor_cost(off, 2, torch.device("cuda")) == cost.MonitorCost(0)


def test_an_interval_beyond_the_end_of_the_run_is_not_promised():
    assert "no step is monitored: the first would be 100" in cost.MonitorCost(100).up_to(99)
    assert cost.MonitorCost(100).up_to(100).startswith("every 100 steps")
    assert cost.MonitorCost(0).up_to(5) == "off"
    keys = ["schedule.warmup_steps=1", "train.steps=90"]
    short = on_mock_tokens(load_config(ROOT / "configs/llama1b_muon.yaml", keys))
    planned = plan_run(short, 8, device_named("h200"))
    assert cost.run_hours(short, planned) == gpu_hours(short, planned)


def test_a_gpu_is_planned_by_its_name(monkeypatch):
    name, gpus, overrides = RUNS[0]
    config = on_mock_tokens(load_config(ROOT / f"configs/{name}.yaml", overrides))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert cost.monitor_cost(config, gpus, torch.device("cuda")) == cost_of(*RUNS[0])
