"""The benchmarks of one process run on small models, and their figures are consistent."""

import json
import sys
from pathlib import Path

import pytest

from models.families import model_size
from scripts.bench import steps, train
from tests.commands import output_of, torchrun
from tests.launch import environment
from tests.paths import ROOT
from tests.run_configs import tiny_config
from training.config import load_config

pytestmark = pytest.mark.slow

SET = "2x16x24,1x32x16"


def test_every_optimizer_has_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "steps.json"
    assert (
        steps.main(["--sets", SET, "--repeats", "1", "--device", "cpu", "--json", str(file)]) == 0
    )
    times = json.loads(file.read_text())["figures"][SET]
    assert set(times) == {*steps.library_options(), *steps.torch_optimizers(5)}
    assert min(row["ms"] for row in times.values()) > 0
    monkeypatch.setenv("WORLD_SIZE", "2")  # ranks exchange over gloo
    assert steps.main(["--device", "cuda"]) == 2


def test_matrices_of_a_recipe_are_stepped_by_its_settings(tmp_path: Path) -> None:
    recipe, file = ROOT / "configs/tiny_sso.yaml", tmp_path / "steps.json"
    options = ["--config", str(recipe), "--shares", "1", "2", "--repeats", "1", "--device", "cpu"]
    options += ["--rules", "muon", "spectral_sphere", "--json", str(file)]
    assert steps.main([*options, "optimizer.rules.spectral_sphere.steps=2"]) == 0
    figures = json.loads(file.read_text())["figures"]
    names = ["muon", "spectral_sphere", "torch AdamW, fused", "torch Muon"]
    assert [list(times) for times in figures.values()] == 2 * [names]
    settings = ["optimizer.rules.spectral_sphere.steps=2", "model.vocab_size=256"]
    config = load_config(recipe, settings)
    assert {options.get("steps", 2) for options in steps.recipe_options(config).values()} == {2}
    shares = [steps.fullest_share(config, ranks) for ranks in (1, 2)]
    whole, half = (sum(rows * cols for rows, cols in share) for share in shares)
    assert whole / 2 <= half < 0.6 * whole


def test_ranks_that_share_weights_send_what_the_exchange_needs(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    output_of(
        *(sys.executable, *torchrun(2), "scripts/bench/steps.py", "--device", "cpu"),
        *("--sets", "4x16x24", "--repeats", "1", "--json", str(file)),
        variables=environment(),
    )
    content = json.loads(file.read_text())
    times = content["figures"]["4x16x24"]
    elements = 4 * 16 * 24
    # Each half is sent to its owner, and the update back.
    assert content["ranks"] == 2 and times["adamw"]["bytes"] == 0
    assert times["muon"]["bytes"] == elements * 4
    assert times["muon, equal"]["bytes"] == elements * 2


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
