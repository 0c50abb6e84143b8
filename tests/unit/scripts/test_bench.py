"""The benches of one process run on small models, and their figures add up."""

import json
from pathlib import Path

import pytest

from models.size import model_size
from scripts.bench import library, optimizer, train
from tests.paths import ROOT
from tests.run_configs import tiny_config

pytestmark = pytest.mark.slow

SET = "2x16x24,1x32x16"


def test_every_library_has_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "library.json"
    assert library.main(["--sets", SET, "--steps", "1", "--json", str(file)]) == 0
    times = json.loads(file.read_text())["figures"][SET]
    assert set(times) == set(library.own()) and min(times.values()) >= 0
    monkeypatch.setenv("WORLD_SIZE", "2")  # ranks exchange over gloo
    assert library.main(["--device", "cuda"]) == 2


def test_steps_of_a_rank_are_compared_with_torchs(tmp_path: Path) -> None:
    options = ["--small", "--config", str(ROOT / "configs/llama1b_sso.yaml"), "--ranks", "2"]
    options += ["--repeats", "1", "--rules", "muon", "spectral_sphere", "--device", "cpu"]
    options += ["--json", str(tmp_path / "out.json")]
    keys = ["optimizer.rules.spectral_sphere.steps=2", "model.layers=1"]
    assert optimizer.main([*options, *keys]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["models"]["llama1b_sso"]
    names = ["muon", "spectral_sphere", "torch.optim adamw", "torch.optim muon"]
    assert [row["optimizer"] for row in rows] == names
    assert all(row["ms"] > 0 and row["ranks"] == 2 for row in rows)


def test_the_speed_of_training_is_that_of_its_phases(folder: str, tmp_path: Path) -> None:
    config, out = tiny_config(folder), tmp_path / "out.json"
    steps = ["--steps", "2", "--peak-flops", "1e9", "--json", str(out)]
    assert train.main(["--config", f"{tmp_path}/config.yaml", *steps]) == 0
    result = json.loads(out.read_text())
    speed = result["tokens_per_second"]
    assert speed == pytest.approx(8 * 32 / result["seconds_per_step"])
    flops = model_size(config.model, 32).flops_per_token
    assert result["mfu"] == pytest.approx(speed * flops / 1e9)
    assert set(result["phase_shares"]) == set(train.PHASES)
    assert sum(result["phase_shares"].values()) == pytest.approx(1)
    for phase in ("data", "forward", "backward", "clip", "optimizer"):
        assert result["phase_seconds"][phase] > 0, phase
    assert sum(result["phase_seconds"].values()) <= 1.01 * result["seconds_per_step"]
    assert not (tmp_path / "run").exists()
