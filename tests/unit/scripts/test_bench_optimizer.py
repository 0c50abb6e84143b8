"""The benchmark of optimizer steps runs on a tiny model, and deals units as documented."""

import json
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
    our_optimizer,
    with_rule,
)
from training.build import config_assignments, config_units
from training.config import load_config

pytestmark = pytest.mark.slow


def recipe(name: str):
    """A recipe's units and assignments."""
    config = load_config(ROOT / f"configs/{name}.yaml", ["model.vocab_size=100352"])
    return config, config_units(config), config_assignments(config)


def test_one_rank_of_eight_has_126_of_the_1008_units_of_dense_17b():
    _, units, assign = recipe("qwen3_1.7b_sso")
    assert sum(assign(unit).has_owner for unit in units) == 1008
    whole = fullest_share(units, assign, 8)
    share = whole.matrices
    shapes = Counter(unit.shape for unit in share)
    # 28 layers of 32 heads, o, gate, up and down, over 8: o or down is one more on the fullest.
    assert shapes[128, 2048] == 112 and shapes[6144, 2048] == 7
    assert sorted((shapes[2048, 2048], shapes[2048, 6144])) == [3, 4]
    assert len(share) == 126
    assert whole.part(whole.elementwise[0]) == whole.elementwise[0].numel / 8


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_whatever_the_rule_a_rank_steps_the_same_elements(rule):
    config = load_config(ROOT / "configs/llama1b_sso.yaml", [*SMALL, "model.vocab_size=256"])
    units, assign = config_units(config), config_assignments(config)
    share = fullest_share(units, assign, 2)
    chosen = config_assignments(with_rule(config, rule))
    optimizer = our_optimizer(share, chosen, torch.device("cpu"))
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    whole = sum(unit.numel for unit in share.matrices)
    parts = sum(share.part(unit) for unit in share.elementwise)
    assert sum(weight.numel() for weight in weights) == whole + parts
    before = [weight.detach().clone() for weight in weights]
    optimizer.step()
    for weight, old in zip(weights, before, strict=True):
        assert weight.isfinite().all() and not torch.equal(weight, old)


def test_all_rules_of_matrices_have_the_same_msign():
    config, units, _ = recipe("qwen3_1.7b_sso")
    (unit,) = [unit for unit in units if unit.name == "layers.0.o"]
    rules = [config_assignments(with_rule(config, rule))(unit).rule for rule in RULES[1:]]
    assert len({tuple(getattr(rule, name) for name in MSIGN) for rule in rules}) == 1
    assert rules[0].msign_dtype == "float32"


def test_shares_are_of_the_step_of_a_rank():
    rows = [Row(8, "ours", "muon", 10.0), Row(8, "ours", "spectral_sphere", 40.0)]
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
    assert Counter(row["side"] for row in rows) == {"ours": 2, "torch.optim": 2}
    assert all(row["ms"] > 0 and row["percent"] > 0 for row in rows)
    by_shape = found["models"]["llama1b_sso"]["by_shape"]
    assert len({row["units"] for row in by_shape}) == len(by_shape) > 1
    assert all(row["ratio"] == row["ours"] / row["torch.optim"] for row in by_shape)
    printed = capsys.readouterr().out
    assert "ratio" in printed and f"{by_shape[0]['ratio']:.3f}" in printed
    assert "target" not in printed  # a CPU's figures say nothing of them


def test_graphs_need_a_gpu(capsys):
    assert main(["--graph", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "error: --graph needs CUDA, got device cpu\n"
