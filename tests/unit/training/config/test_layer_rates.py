"""Rates by layer and role: what a config may say, and which runs it tells apart."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.minimal_config import problems
from training.build import config_assignments, config_units
from training.checkpoint.identity import changes, settings
from training.config import Config
from training.config import load_config as load_any


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """A config with a vocabulary, so that its units are known."""
    return load_any(path, ["model.vocab_size=64", *overrides])


def rates(config: Config) -> dict[str, float]:
    """Each unit's peak learning rate."""
    assign = config_assignments(config)
    return {unit.name: assign(unit).lr for unit in config_units(config)}


def test_factors_multiply_every_rate_of_a_layer(minimal: Path) -> None:
    plain = rates(load_config(minimal))
    factors = (1.0, 0.5, 0.25, 2.0)
    found = rates(load_config(minimal, ["optimizer.layer_rates.factors=[1, 0.5, 0.25, 2]"]))
    for name, lr in found.items():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        assert lr == plain[name] * (1.0 if layer is None else factors[layer]), name
    assert any(name.startswith("layers.3.") and "norm" in name for name in found)


def test_a_power_of_depth(minimal: Path) -> None:
    plain = rates(load_config(minimal))
    found = rates(load_config(minimal, ["optimizer.layer_rates.depth_power=-0.5"]))
    assert found["layers.0.up"] == plain["layers.0.up"]
    assert found["layers.3.up"] == pytest.approx(plain["layers.3.up"] / 2, rel=1e-15)
    assert found["head"] == plain["head"] and found["embedding"] == plain["embedding"]


def test_gamma_of_pc_layers_follows_its_layer(minimal: Path) -> None:
    overrides = ["pc={}", "pc.gamma_lr=0.01", "optimizer.layer_rates.factors=[1, 1, 1, 3]"]
    for evaluator in ("materialized", "in_graph"):
        config = load_config(minimal, [*overrides, f"pc.evaluator={evaluator}"])
        assign = config_assignments(config)
        units = {unit.name: unit for unit in config_units(config)}
        for layer, expected in ((0, 0.01), (3, 0.03)):
            assigned = assign(units[f"layers.{layer}.gate"])
            if evaluator == "materialized":
                assert assigned.pc is not None and assigned.pc.gamma_lr == pytest.approx(expected)
            else:
                gamma = assign(units[f"layers.{layer}.gate.gamma"])
                assert gamma.lr == pytest.approx(expected)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.layer_rates={}"], "optimizer.layer_rates.depth_power or factors must be set"),
        (
            ["optimizer.layer_rates={factors: [1, 1, 1, 1], depth_power: 1}"],
            "optimizer.layer_rates.depth_power or factors must be set, and not both",
        ),
        (["optimizer.layer_rates.factors=[1, -1, 1, 1]"], "optimizer.layer_rates.factors[1] must"),
        (["optimizer.layer_rates.factors=[1, 1]"], "optimizer.layer_rates.factors must have model"),
        (
            ["optimizer.roles.q.lr_factor=300", "optimizer.matrix.weight_decay=1"],
            "optimizer.layer_rates and lr_factor must keep lr times weight_decay below 1",
        ),
    ],
)
def test_what_is_wrong_is_said(minimal: Path, overrides: list[str], message: str) -> None:
    (problem,) = problems(minimal, *overrides)
    assert problem.startswith(message)


@pytest.mark.parametrize(
    "override",
    ["optimizer.layer_rates.depth_power=-1", "optimizer.roles.q.lr_factor=0.5"],
)
def test_a_run_with_other_rates_is_another_run(minimal: Path, override: str) -> None:
    plain = settings(load_config(minimal))["optimizer"]
    other = settings(load_config(minimal, [override]))["optimizer"]
    key = override.split("=")[0].removeprefix("optimizer.")
    assert any(line.startswith(key) for line in changes(plain, other))
