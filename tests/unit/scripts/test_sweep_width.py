"""The sweep of learning rates over widths: its grid, its runs, its reading and its plot."""

import json
from copy import deepcopy
from math import sqrt
from pathlib import Path

import pytest
import yaml

from scripts.plots.sweep import plot_sweep
from scripts.sweep_width import (
    Point,
    best_rates,
    grid_table,
    main,
    read_sweep,
    settings,
    verdicts,
)
from spectral.scaling import update_scale
from tests.token_files import write_token_set
from training.build import config_units
from training.config import load_config

TINY = "studies/widths/tiny.yaml"


def test_the_tiny_preset_covers_what_is_compared(root: Path) -> None:
    sweep = read_sweep(root / TINY)
    assert sweep.widths == [64, 128, 256]
    rules = {}
    for name, swept in sweep.optimizers.items():
        for width in sweep.widths:
            own = settings(sweep, name, width, swept.rates[0])
            config = load_config(root / swept.config, own)
            rules[name] = config.optimizer.matrix.rule
            model = config.model
            assert (model.hidden, model.head_size) == (width, 32)
            assert model.ffn / width == sweep.ffn_ratio and model.init.spectral
            shrunk = 64 / width
            assert config.optimizer.head.lr == pytest.approx(3e-3 * shrunk)
            assert model.init.head_std == pytest.approx(0.02 * shrunk)
            factor = shrunk if swept.rate_scaling == "mup" else 1
            assert config.optimizer.matrix.lr == pytest.approx(swept.rates[0] * factor)
    assert set(rules.values()) == {"spectral_sphere", "muon_sphere", "muon", "adamw"}
    assert {s.rate_scaling for n, s in sweep.optimizers.items() if rules[n] == "adamw"} == {
        "none", "mup"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["SSO", "MuonSphere", "Muon"])
def test_spectral_rules_are_scaled_by_the_shape_of_each_matrix(root: Path, name: str) -> None:
    sweep = read_sweep(root / TINY)
    for width in sweep.widths:
        own = [*settings(sweep, name, width, 0.04), "model.vocab_size=100"]
        config = load_config(root / sweep.optimizers[name].config, own)
        rule = config.optimizer.rule(config.optimizer.matrix.rule)
        for unit in (u for u in config_units(config) if u.role in ("q", "o", "down")):
            rows, cols = unit.shape
            assert update_scale(unit.shape, rule.scale) == sqrt(rows / cols)


def points(losses: dict[tuple[int, float], float | None]) -> list[Point]:
    """The grid of one optimizer."""
    return [Point("x", width, rate, [loss], loss) for (width, rate), loss in losses.items()]


def test_the_best_rate_is_starred_and_compared() -> None:
    same = points(
        {(64, 1.0): 3.0, (64, 2.0): 2.5, (64, 4.0): 2.6, (128, 1.0): 2.9, (128, 2.0): 2.4,
         (128, 4.0): None}
    )  # fmt: skip
    best = best_rates(same)
    assert [(each.width, each.rate, each.inside) for each in best] == [
        (64, 2.0, True), (128, 2.0, True)
    ]  # fmt: skip
    assert verdicts(best) == {"x": "the same: 2 at 64, 2 at 128"}
    text = grid_table(same)
    assert "2.5000*" in text and "2.4000*" in text and text.count("*") == 2 and "-" in text
    moved = points({(64, 1.0): 1.0, (64, 2.0): 2.0, (128, 1.0): 2.0, (128, 2.0): 1.0})
    assert verdicts(best_rates(moved)) == {
        "x": "NOT the same: 1 at 64, 2 at 128; at the edge of the grid"
    }


@pytest.fixture
def sweep_file(minimal: Path, tmp_path: Path) -> Path:
    """A sweep of two-step runs, of which one rate is beyond all bounds."""
    config = yaml.safe_load(minimal.read_text())
    write_token_set(tmp_path / "tokens", tokens=4_000, vocab=120, seed=0)
    sets = {"walk": {"path": str(tmp_path / "tokens")}}
    config["data"] = {"train": sets, "validation": deepcopy(sets)}
    config["model"] |= {"layers": 1, "vocab_size": 120}
    config["train"] = {"steps": 3, "global_batch": 2, "micro_batch": 2, "sequence_length": 16}
    config["train"]["max_skipped_steps"] = 0
    config["schedule"] = {"kind": "constant"}
    minimal.write_text(yaml.safe_dump(config))
    path = tmp_path / "sweep.yaml"
    rule = [
        "optimizer.matrix.rule=adamw",
        "optimizer.matrix.weight_decay=0",
        "model.init.spectral=false",
    ]
    swept = {"config": str(minimal), "rates": [1e-3, 1e-2, 1e38], "overrides": rule}
    sweep = {
        "title": "t", "seeds": [1], "widths": [32], "base_width": 32, "head_dim": 16,
        "ffn_ratio": 1.5, "overrides": ["validation.samples=4", "checkpoint.interval=0"],
        "optimizers": {"AdamW": swept},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(sweep))
    return path


def test_a_sweep_runs_once_goes_on_and_is_drawn(sweep_file, tmp_path, capsys):
    output = tmp_path / "out"
    assert main([str(sweep_file), str(output)]) == 0
    printed = capsys.readouterr().out
    result = json.loads((output / "results.json").read_text())
    losses = [point["loss"] for point in result["points"]]
    assert losses[2] is None and "AdamW-32-1e+38-1: not finite" in printed
    lines = (output / "AdamW-32-0.01-1" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["val/walk/loss"] == losses[1]
    assert (output / "loss_against_rate.svg").stat().st_size > 1000
    axes = plot_sweep(output / "results.json").axes[0]
    assert list(axes.lines[0].get_xdata()) == [1e-3, 1e-2, 1e38]
    assert list(axes.lines[0].get_ydata())[:2] == losses[:2]
    (star,) = (line for line in axes.lines if line.get_marker() == "*")
    assert star.get_ydata()[0] == min(losses[:2])
    # With the bad rate replaced, only the new one is run.
    content = yaml.safe_load(sweep_file.read_text())
    content["optimizers"]["AdamW"]["rates"][2] = 0.1
    sweep_file.write_text(yaml.safe_dump(content))
    assert main([str(sweep_file), str(output)]) == 0
    assert capsys.readouterr().out.count("-1: ") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widths": [40]}, "widths must be multiples of head_dim = 16, got 40"),
        ({"widths": [32, 32]}, "widths must be different ones, at least one, got [32, 32]"),
        ({"optimizers": {"A": {"config": "x", "rates": [1.0]}}}, "rates must be three or more"),
        ({"width": [32]}, "width"),
    ],
)
def test_what_is_no_sweep_is_refused(sweep_file, tmp_path, change, message, capsys):
    sweep_file.write_text(yaml.safe_dump(yaml.safe_load(sweep_file.read_text()) | change))
    assert main([str(sweep_file), str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_an_optimizer_the_file_lacks_is_refused(root, tmp_path, capsys):
    arguments = [str(root / TINY), str(tmp_path / "out"), "--optimizers", "Lion"]
    assert main(arguments) == 2
    assert "optimizers must be among SSO, MuonSphere" in capsys.readouterr().err
