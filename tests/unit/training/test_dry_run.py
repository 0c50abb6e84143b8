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
    assert f"{size.parameters:,}, of which a token uses {size.active_parameters:,}" in printed
    assert sum(stage["parameters"] for stage in planned["stages"]) <= size.parameters
    assert config.optimizer.matrix.rule in printed


def section(printed, name):
    """The lines of one section of what was printed."""
    return printed.split(f"== {name}\n")[1].split("\n==")[0].splitlines()


def test_a_dry_run_shows_the_gram_penalty(capsys):
    recipe = ROOT / "configs" / "tiny_gpt_muon_gram.yaml"
    keys = ["model.vocab_size=4096", "gram_penalty.power=1", "gram_penalty.side=out"]
    keys += ["train.micro_batch=8", "parallel.tensor=2"]
    assert pretrain.main(["--config", str(recipe), *keys, "--dry-run", "--gpus", "4"]) == 0
    printed = capsys.readouterr().out
    shown = dict(line.split("  ", 1) for line in section(printed, "Gram penalty"))
    shown = {name: value.strip() for name, value in shown.items()}
    # v and o 128 x 128, down 128 x 512, four layers: the Gram matrix and a product with it.
    flops = 4 * (2 * 2 * 128**3 * 2 + 2 * 2 * 128**2 * 512)
    assert shown == {
        "units": "4 v, 4 o, 4 down",
        "of each": "0.001 ||OffDiag(W W^T)||_F",
        "active": "in steps 1 to 30 of 300",
        "FLOPs per active step": f"{flops:.4g}",
    }
    rows = {line.split("  ")[0]: line.split() for line in section(printed, "units")}
    assert "penalty" in rows["units"]
    assert "0.001" in rows["layers 0-3 x o"] and "0.001" not in rows["layers 0-3 x up"]
    assert "optimizer's, with the Gram penalty active" in printed
    assert "Gram penalty buffers, before the optimizer's (estimate)" in printed


def test_a_dry_run_without_it_shows_none(capsys):
    recipe = ROOT / "configs" / "tiny_gpt_muon.yaml"
    keys = ["model.vocab_size=4096"]
    assert pretrain.main(["--config", str(recipe), *keys, "--dry-run", "--gpus", "2"]) == 0
    assert "Gram penalty" not in capsys.readouterr().out
