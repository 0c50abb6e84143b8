"""Every shipped recipe can be dry-run: its model, routing, FLOPs and memory are printed."""

from pathlib import Path

import pytest

import pretrain
from models.size import model_size
from training.config import load_config

# The plan of the 236B model takes seconds: one of its recipes stands for the others.
RECIPES = sorted(
    path
    for path in (Path(__file__).resolve().parents[2] / "configs").glob("*.yaml")
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
