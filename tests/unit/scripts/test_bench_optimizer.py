"""The benchmark of optimizer steps runs on a tiny model, and deals units as documented."""

import json
from collections import Counter

import pytest

from scripts.bench.optimizer import (
    ROOT,
    main,
)

pytestmark = pytest.mark.slow


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
