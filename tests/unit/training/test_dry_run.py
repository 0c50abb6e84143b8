"""Every shipped recipe can be dry-run: its model, routing, FLOPs and memory are printed."""

import pytest

import pretrain
from models.size import model_size
from tests.paths import ROOT
from training.config import load_config

# The plan of the 236B model takes seconds: one of its recipes stands for the others.
RECIPES = sorted(
    path
    for path in (ROOT / "configs").glob("*.yaml")
    if not path.stem.startswith("deepseek236b") or path.stem == "deepseek236b_sso"
)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_dry_run(path, capsys):
    config = load_config(path)
    overrides = [] if config.model.vocab_size else ["model.vocab_size=4096"]
    train, parallel = config.train, config.parallel
    copies = min(max(8, parallel.expert), train.global_batch // train.micro_batch)
    while train.global_batch % (train.micro_batch * copies):
        copies -= 1
    ranks = str(copies * parallel.model_ranks)
    assert pretrain.main(["--config", str(path), *overrides, "--dry-run", "--gpus", ranks]) == 0
    printed = capsys.readouterr().out
    for word in ("== model", "== routing", "== run", "== memory per rank", "FLOPs per token"):
        assert word in printed
    for role in ("embedding", "head", "layers.0.q", f"layers.{config.model.layers - 1}."):
        assert role in printed
    assert config.optimizer.matrix.rule in printed
    sized = load_config(path, overrides)
    size = model_size(sized.model, sized.train.sequence_length)
    figures = dict(line.rsplit("  ", 1) for line in section(printed, "run") if "  " in line)
    figures = {name.strip(): value.strip() for name, value in figures.items()}
    assert figures["parameters"] == f"{size.parameters:,}"
    assert figures["active parameters per token"] == f"{size.active_parameters:,}"
    assert float(figures["FLOPs per token"]) == pytest.approx(size.flops_per_token, rel=1e-3)


def section(printed, name):
    """The lines of one section of what was printed."""
    return printed.split(f"== {name}\n")[1].split("\n\n")[0].splitlines()


def test_a_dry_run_shows_the_gram_penalty(capsys):
    recipe = RECIPES[0].parent / "tiny_gpt_muon_gram.yaml"
    keys = ["model.vocab_size=4096", "gram_penalty.power=1", "gram_penalty.side=out"]
    keys += ["gram_penalty.schedule=adaptive", "gram_penalty.adaptive.measure=top_share"]
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
        "active": "in steps 1 to 30 of 300, switched by top_share every 10 steps, on above 2, "
        "off below 1.5",
        "FLOPs per active step": f"{flops:.4g}",
    }
    rows = {line.split()[0]: line.split() for line in section(printed, "routing")}
    assert "penalty" in rows["unit"]
    assert "0.001" in rows["layers.0.o"] and "0.001" not in rows["layers.0.up"]
    for word in ("penalty weights", "penalty out", "all, with the Gram penalty active"):
        assert word in printed
    assert "Gram penalty buffers, before the optimizer's (estimate)" in printed


def test_a_dry_run_without_it_shows_none(capsys):
    recipe = RECIPES[0].parent / "tiny_gpt_muon.yaml"
    keys = ["model.vocab_size=4096"]
    assert pretrain.main(["--config", str(recipe), *keys, "--dry-run", "--gpus", "2"]) == 0
    assert "Gram penalty" not in (printed := capsys.readouterr().out)
    assert "penalty out" not in printed
