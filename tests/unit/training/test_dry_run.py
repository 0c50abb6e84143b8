"""Every recipe fits its GPUs, and its plan fits one screen; --fit writes a config that a run
accepts."""

import json
import re

import pytest

import pretrain
from models.families import model_size
from tests.paths import ROOT
from tests.small_recipes import every_recipe
from training.config import load_config

SCREEN = 60


@pytest.mark.parametrize("name", every_recipe())
def test_a_recipe_fits_the_gpus_it_names(name, capsys, tmp_path):
    path = ROOT / "configs" / f"{name}.yaml"
    config = load_config(path)
    overrides = [] if config.model.vocab_size else ["model.vocab_size=4096"]
    written = tmp_path / "plan.json"
    command = ["--config", str(path), *overrides, "--dry-run", "--json", str(written)]
    assert pretrain.main(command) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) <= SCREEN
    assert max(map(len, printed.splitlines())) <= 200
    planned = json.loads(written.read_text())
    assert planned["gpus"] == config.plan.gpus
    assert planned["fits"] is True and "\nfits: " in printed
    room = 0.95 * planned["device_memory_bytes"]
    assert all(stage["memory"]["total"] <= room for stage in planned["stages"])
    # Steps of a ramp are shorter in proportion to their batches, except for the optimizer.
    full = config.train.samples() / config.train.global_batch
    full += planned["monitors"]["share"] * config.train.steps
    hours = full * planned["step_seconds"] * planned["gpus"] / 3600
    ramp = bool(config.train.batch_ramp)
    assert planned["gpu_hours"] == pytest.approx(hours, rel=0.01 if ramp else 1e-6)
    assert f"{planned['gpu_hours']:,.0f} GPU-hours" in printed
    # A rank has three or four of its largest matrices.
    assert ("for the busiest, which has 1.42 times" in printed) == (name == "llama70b_sso")
    for word in ("== units", "== run", "== memory per rank", "== step, modelled"):
        assert word in printed
    sized = load_config(path, overrides)
    size = model_size(sized.model, sized.train.sequence_length)
    assert f"{size.parameters:,}, {size.active_parameters:,} per token" in printed
    assert sum(stage["parameters"] for stage in planned["stages"]) <= size.parameters
    assert config.optimizer.matrix.rule in printed


def test_a_fitted_layout_is_a_config(tmp_path, capsys):
    written = str(tmp_path / "1e5.yaml")
    (tmp_path / "a: b").symlink_to(ROOT / "configs")
    recipe = str(tmp_path / "a: b" / "tiny_moe_muon.yaml")
    keys = ["model.vocab_size=512", "train.precision=bf16", "train.global_batch=8"]
    keys += ["train.micro_batch=4"]
    fit = ["--config", recipe, *keys, "--fit", "--gpus", "4", "--device", "a100"]
    assert pretrain.main([*fit, "--write", written]) == 0
    header, *layouts, _, _ = capsys.readouterr().out.splitlines()
    assert "limited by" in header and layouts
    columns = [cell.start() for cell in re.finditer(r"\S+( \S+)*", header)]
    assert len(columns) == 13
    for line in layouts:
        assert all(line[start - 1] == " " != line[start] for start in columns[1:])
    assert pretrain.main(["--config", written, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "NVIDIA A100" in printed and "4 ranks (" in printed and "fits: " in printed
    mine = load_config(written)
    assert mine.run.name == "1e5" and mine.model.vocab_size == 512
    assert (mine.plan.gpus, mine.plan.device) == (4, "a100")


def test_the_config_of_a_layout_keeps_references(tmp_path, monkeypatch):
    """An override's references are resolved again when the file is read."""
    monkeypatch.setenv("TOKENS", "here")
    written = tmp_path / "mine.yaml"
    arguments = ["--config", str(ROOT / "configs" / "tiny_muon.yaml"), "--fit", "--gpus", "2"]
    arguments += ["model.vocab_size=512", "optimizer.head.lr=${optimizer.matrix.lr}"]
    arguments += ["data.train.kjv.path=${oc.env:TOKENS}/kjv", "--write", str(written)]
    assert pretrain.main(arguments) == 0
    monkeypatch.setenv("TOKENS", "there")
    mine = load_config(written, ["optimizer.matrix.lr=0.5"])
    assert mine.optimizer.head.lr == 0.5
    assert mine.data.train["kjv"].path == "there/kjv"
