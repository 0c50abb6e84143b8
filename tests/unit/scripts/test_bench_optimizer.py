"""The benchmark of optimizer steps runs on a tiny model, and deals units as documented."""

import json
import sys
from collections import Counter

import pytest
import torch

from scripts.bench.optimizer import (
    BATCH_TOKENS,
    MSIGN,
    ROOT,
    RULES,
    SMALL,
    Row,
    fullest_share,
    in_training,
    main,
    matrices,
    with_rule,
)
from scripts.bench.optimizer_sides import Ours, PublicSSO
from training.build import config_assignments, config_units
from training.config import load_config


def recipe(name: str):
    """A recipe's units and assignments."""
    config = load_config(ROOT / f"configs/{name}.yaml", ["model.vocab_size=100352"])
    return config, config_units(config), config_assignments(config)


def test_one_rank_of_eight_has_126_of_the_1008_units_of_dense_17b():
    _, units, assign = recipe("qwen3_1.7b_sso")
    assert len(matrices(units, assign)) == 1008
    whole = fullest_share(units, assign, 8)
    share = whole.matrices
    shapes = Counter(unit.shape for unit in share)
    # 28 layers of 32 heads, o, gate, up and down, over 8: o or down is one more on the fullest.
    assert shapes[128, 2048] == 112 and shapes[6144, 2048] == 7
    assert sorted((shapes[2048, 2048], shapes[2048, 6144])) == [3, 4]
    assert len(share) == 126
    assert whole.part(whole.elementwise[0]) == whole.elementwise[0].numel / 8


@pytest.mark.parametrize("rule", ["adamw", "muon"])
@pytest.mark.parametrize("pc", [False, True])
def test_whatever_the_rule_a_rank_steps_the_same_elements(rule, pc):
    config = load_config(ROOT / "configs/llama1b_sso.yaml", [*SMALL, "model.vocab_size=256"])
    units, assign = config_units(config), config_assignments(config)
    share = fullest_share(units, assign, 2)
    side = Ours(share, config_assignments(with_rule(config, rule, pc)), torch.device("cpu"))
    whole = sum(unit.numel for unit in share.matrices)
    parts = sum(share.part(unit) for unit in share.elementwise)
    assert sum(stack.parameter.numel() for stack in side.stacks) == whole + parts
    side.prepare()
    side.step()
    assert all(stack.parameter.isfinite().all() for stack in side.stacks)


def test_preconditioned_recipes_have_the_same_units_and_their_gammas_step():
    config, units, _ = recipe("llama1b_sso")
    chosen = with_rule(config, "adamw", pc=True)
    assign = config_assignments(chosen)
    whole = matrices(config_units(chosen), assign)
    assert {unit.name for unit in whole} <= {unit.name for unit in units}
    assert all(assign(unit).pc is not None for unit in whole)


def test_all_rules_of_matrices_have_the_same_msign():
    config, units, _ = recipe("qwen3_1.7b_sso")
    (unit,) = [unit for unit in units if unit.name == "layers.0.o"]
    rules = [config_assignments(with_rule(config, rule, pc=False))(unit).rule for rule in RULES[1:]]
    assert len({tuple(getattr(rule, name) for name in MSIGN) for rule in rules}) == 1
    assert rules[0].msign_dtype == "float32"


def test_shares_are_of_the_step_of_a_rank():
    rows = [Row(8, "ours", "muon", False, 10.0), Row(8, "ours", "spectral_sphere", False, 40.0)]
    # 524,288 tokens on each of eight ranks at 262,144 per second are two seconds.
    in_training(rows, tokens_per_second=2**18, batch_tokens=BATCH_TOKENS)
    assert [row.percent for row in rows] == pytest.approx([0.5, 2.0])
    assert rows[1].over_muon == pytest.approx(1.5)


def test_the_whole_bench_runs_and_says_what_it_measured(tmp_path, capsys):
    (tmp_path / "train.json").write_text(json.dumps({"tokens_per_second": 1000.0}))
    recipe = str(ROOT / "configs/llama1b_sso.yaml")
    options = ["--small", "--config", recipe, "--ranks", "2", "--repeats", "1"]
    options += ["--rules", "muon", "spectral_sphere", "--device", "cpu"]
    options += ["--train-json", str(tmp_path / "train.json"), "--json", str(tmp_path / "out.json")]
    assert main([*options, "optimizer.rules.spectral_sphere.steps=2", "model.layers=1"]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["tokens_per_second"] == 1000.0 and found["device"] == "cpu"
    rows = found["models"]["llama1b_sso"]["rows"]
    sides = Counter(row["side"] for row in rows)
    assert sides == {"ours": 4, "torch.optim": 2, "slow reference": 3}
    assert all(row["ms"] > 0 and row["percent"] > 0 for row in rows)
    forms = found["models"]["llama1b_sso"]["forms"]
    assert len(forms) == len({row["units"] for row in forms}) > 1
    assert all(row["one batch"] > 0 and row["one by one"] > 0 for row in forms)
    by_shape = found["models"]["llama1b_sso"]["by_shape"]
    assert [row["units"] for row in by_shape] == [row["units"] for row in forms]
    assert all(row["ours"] > 0 and row["torch.optim"] > 0 for row in by_shape)
    assert all(row["ratio"] == row["ours"] / row["torch.optim"] for row in by_shape)
    printed = capsys.readouterr().out
    assert "ratio" in printed and f"{by_shape[0]['ratio']:.3f}" in printed
    assert "target" not in printed  # a CPU's figures say nothing of them


def test_graphs_need_a_gpu(capsys):
    assert main(["--graph", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "error: --graph needs CUDA, got device cpu\n"


PUBLIC = """
import torch

class SpectralBall(torch.optim.SGD):
    def __init__(self, parameters, lr, momentum_beta, weight_decay, **settings):
        assert settings["msign_steps"] == 8 and settings["solver_tolerance_f"] == 2e-4
        super().__init__(parameters, lr, momentum_beta, weight_decay=weight_decay)
"""
"""A package of the public one's interface."""


def test_the_public_sso_steps_all_matrices(tmp_path, monkeypatch):
    package = tmp_path / "emerging_optimizers" / "orthogonalized_optimizers"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(PUBLIC)
    monkeypatch.setattr("sys.path", [*sys.path])
    config = load_config(ROOT / "configs/llama1b_sso.yaml", [*SMALL, "model.vocab_size=256"])
    share = fullest_share(config_units(config), config_assignments(config), 2)
    side = PublicSSO(share, torch.device("cpu"), tmp_path)
    before = [x.detach().clone() for x in side.parameters]
    side.prepare()
    side.step()
    assert len(before) == len(share.matrices) + 1
    assert all((a != b).any() for a, b in zip(side.parameters, before, strict=True))


def test_a_folder_without_the_public_sso_is_refused(tmp_path, capsys):
    assert main(["--public-sso", str(tmp_path), "--device", "cpu"]) == 2
    assert "--public-sso must name a folder with emerging_optimizers" in capsys.readouterr().err
