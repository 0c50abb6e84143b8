"""The planning commands of README and docs name legal batches and counts, and write a config."""

import re
import shlex

import pytest

import pretrain
from tests.paths import ROOT
from training.config import check, load_config

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
JOINED = {page.name: re.sub(r"\\\n\s+", "", page.read_text()) for page in PAGES}
COMMANDS = [
    (name, line.strip())
    for name, text in JOINED.items()
    for line in text.splitlines()
    if re.search(r"pretrain\.py .*--(dry-run|fit)", line) and line.strip().startswith("python ")
]


def parsed(command):
    """The options of a command line."""
    return pretrain.parse(shlex.split(command)[2:])


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda each: each[:60])
def test_a_documented_plan_is_legal(page, command):
    options = parsed(command)
    if not options.config.endswith("mine.yaml"):  # written by the command before
        config = load_config(ROOT / options.config, options.overrides)
        if options.dry_run:
            check(config, options.gpus or config.plan.gpus)


def test_clusters_are_of_legal_sizes():
    found = []
    for page in (ROOT / "docs" / "running.md", ROOT / "scripts" / "slurm" / "README.md"):
        text = re.sub(r"\\\n\s+", "", page.read_text())
        found += re.findall(r"sbatch .*--nodes=(\d+) \S+ (\S+\.yaml)", text)
    assert len(found) == 2
    for nodes, path in found:
        check(load_config(ROOT / path), 8 * int(nodes))


def test_three_commands_lead_to_a_config(tmp_path, capsys):
    """Those of the page, on the tiny mixture of experts."""
    first, second, third = [command for name, command in COMMANDS if name == "planning.md"][:3]
    assert parsed(second).fit and parsed(second).write == parsed(third).config
    written = str(tmp_path / "mine.yaml")
    recipe = str(ROOT / "configs" / "tiny_moe_muon.yaml")
    keys = ["model.vocab_size=512", "train.precision=bf16", "train.global_batch=8"]
    keys += ["train.micro_batch=4"]
    assert parsed(first).dry_run and parsed(third).dry_run
    fit = ["--config", recipe, *keys, "--fit", "--gpus", "4", "--device", "a100"]
    assert pretrain.main([*fit, "--write", written]) == 0
    assert "limited by" in capsys.readouterr().out
    assert pretrain.main(["--config", written, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "4 x NVIDIA A100" in printed and "fits: " in printed
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
