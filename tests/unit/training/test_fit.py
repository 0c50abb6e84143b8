"""--fit writes a config that a run takes."""

import re

import pretrain
from tests.paths import ROOT
from training.config import load_config


def test_a_fitted_layout_is_a_config(tmp_path, capsys):
    written = str(tmp_path / "mine.yaml")
    recipe = str(ROOT / "configs" / "tiny_moe_muon.yaml")
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
    assert mine.run.name == "mine" and mine.model.vocab_size == 512
    assert (mine.plan.gpus, mine.plan.device) == (4, "a100")


def test_the_config_of_a_layout_keeps_references(tmp_path, monkeypatch):
    """What an override refers to is looked up again when the file is read."""
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
