"""Every shipped recipe fits the GPUs it names, and its plan fits one screen."""

import json

import pytest

import pretrain
from models.size import model_size
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
    for word in ("== units", "== run", "== memory per rank", "== step, modelled"):
        assert word in printed
    sized = load_config(path, overrides)
    size = model_size(sized.model, sized.train.sequence_length)
    assert f"{size.parameters:,}, {size.active_parameters:,} per token" in printed
    assert sum(stage["parameters"] for stage in planned["stages"]) <= size.parameters
    assert config.optimizer.matrix.rule in printed
