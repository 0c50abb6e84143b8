"""The choice of rules in whole runs of one process."""

import json
from pathlib import Path

import pytest
import torch

from tests.minimal_config import problems
from tests.run_configs import read_config, tiny_config
from tests.token_files import write_token_set
from training.build import build_data, build_trainer
from training.run import train

AUTO = {
    "optimizer__auto_rule__lr": 3e-3,
    "optimizer__auto_rule__interval": 2,
    "optimizer__auto_rule__smoothing": 0.5,
    "optimizer__auto_rule__hysteresis": 0.0,
    "monitors__interval": 1,
}


@pytest.fixture
def folder(tmp_path):
    """A folder with a token set."""
    write_token_set(tmp_path / "tokens", tokens=8_000, vocab=120, seed=0)
    return str(tmp_path)


def lines(folder: str, name: str) -> list[dict]:
    """The lines of a file of the run."""
    return [json.loads(line) for line in (Path(folder) / "run" / name).read_text().splitlines()]


def test_matrices_choose_by_their_smoothed_ratio_and_say_so(folder, world):
    train(tiny_config(folder, "muon", train__exit_step=6, **AUTO), world)
    seen = lines(folder, "monitors.jsonl")
    smooth: dict[str, float] = {}
    on: dict[str, float] = {}
    for line in seen:
        for name, unit in line["units"].items():
            if unit["role"] in ("embedding", "head"):
                assert "on_spectral" not in unit
                continue
            assert unit["on_spectral"] == on.get(name, 1.0)
            assert unit["criterion_smoothed"] == pytest.approx(smooth.get(name, 1.0), rel=1e-5)
            if line["step"] % 2 == 0:
                ratio = unit["criterion_ratio"]
                smooth[name] = (smooth[name] * ratio) ** 0.5 if name in smooth else ratio
                on[name] = float(smooth[name] >= 1)
    assert set(on.values()) == {0.0, 1.0}  # some of each, or nothing is shown
    metrics = {row["step"]: row for row in lines(folder, "metrics.jsonl")}
    gates = [unit["on_spectral"] for u, unit in seen[3]["units"].items() if unit["role"] == "q"]
    assert metrics[4]["auto_rule/share/q"] == sum(gates) / len(gates)
    routes = {row["unit"]: row for row in lines(folder, "routing.jsonl")}
    assert routes["layers.0.gate"]["rule"] == "muon or adamw"


def test_a_continued_run_is_the_same_bit_for_bit(folder, world):
    found: dict[str, list[float]] = {"whole": [], "continued": []}
    config = {"train__exit_step": 7, "checkpoint__interval": 5, **AUTO}
    for name, resume in (("whole", "latest"), ("continued", "5")):
        kept = found[name]
        make = tiny_config if name == "whole" else read_config
        arguments = (folder, "spectral_sphere") if name == "whole" else (folder,)
        train(
            make(*arguments, **config),
            world,
            resume=resume,
            on_step=lambda _, result, kept=kept: kept.append(result.loss.item()),
        )
    assert found["continued"] == found["whole"][5:]


def test_monitors_do_not_matter_to_the_choice(folder, world):
    curves = []
    for interval in (0, 1, 3):
        config = tiny_config(folder, "muon", **{**AUTO, "monitors__interval": interval})
        trainer = build_trainer(config, world, *build_data(config))
        trainer.record = lambda line, step: None
        losses = []
        trainer.on_step = lambda _, result, losses=losses: losses.append(result.loss.item())
        for _ in range(6):
            trainer.advance()
        states = [
            b.state["on_spectral"] for b in trainer.optimizer.stacks if "on_spectral" in b.state
        ]
        curves.append((losses, torch.cat(states).tolist()))
    assert curves[0] == curves[1] == curves[2]
    assert {0.0, 1.0} == set(curves[0][1])


@pytest.mark.parametrize("rule", ["muon", "spectral_sphere"])
def test_a_run_in_which_nothing_switches_is_that_of_the_spectral_rule(folder, world, rule):
    curves = []
    for keys in ({}, {**AUTO, "optimizer__auto_rule__hysteresis": 1e9}):
        config = tiny_config(folder, rule, train__exit_step=6, **keys)
        kept: list[float] = []
        train(config, world, on_step=lambda _, result, kept=kept: kept.append(result.loss.item()))
        curves.append(kept)
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)  # float32 momentum in another order


@pytest.mark.parametrize("rule", ["muon", "spectral_sphere"])
def test_pc_layers_choose_by_the_gradient_of_the_effective_weight(folder, world, rule):
    """The ratio that decides is that of the monitors, whose gradient and input are those of PC(W)
    (tests/distributed/test_monitors.py), and what is chosen is how W is stepped."""
    config = tiny_config(folder, rule, train__exit_step=6, pc__level=2, **AUTO)
    train(config, world)
    on: set[float] = set()
    smooth: dict[str, float] = {}
    for line in lines(folder, "monitors.jsonl"):
        for name, unit in line["units"].items():
            if "on_spectral" not in unit:
                continue
            on.add(unit["on_spectral"])
            assert unit["criterion_smoothed"] == pytest.approx(smooth.get(name, 1.0), rel=1e-5)
            if line["step"] % 2 == 0:
                ratio = unit["criterion_ratio"]
                smooth[name] = (smooth[name] * ratio) ** 0.5 if name in smooth else ratio
    assert on == {0.0, 1.0}
    routes = lines(folder, "routing.jsonl")
    assert any(row["pc"] and row["rule"] == f"{rule} or adamw" for row in routes)


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (
            "optimizer.distributed.tensor_mode=shardwise",
            "optimizer.distributed.tensor_mode must be owner or duplicated with "
            "optimizer.auto_rule, which compares whole matrices, got shardwise",
        ),
        (
            "optimizer.distributed.momentum_dtype=bf16",
            "optimizer.distributed.momentum_dtype must be null or fp32 with optimizer.auto_rule, "
            "as both rules keep their state in the type of the master weights, got bf16",
        ),
        (
            "pc.evaluator=in_graph",
            "pc.evaluator must be materialized with optimizer.auto_rule, which needs the gradient "
            "of PC(W), got in_graph",
        ),
    ],
)
def test_what_the_choice_cannot_be_made_with_is_refused(minimal, key, line):
    keys = ("optimizer.auto_rule.lr=1e-3", "optimizer.matrix.rule=muon", key)
    assert problems(minimal, *keys) == [line]


def test_a_config_that_leaves_no_choice_is_refused(minimal):
    line = "optimizer.auto_rule needs a spectral matrix.rule, got adamw"
    keys = ("optimizer.auto_rule.lr=1e-3", "optimizer.matrix.rule=adamw")
    assert problems(minimal, *keys) == [line]
