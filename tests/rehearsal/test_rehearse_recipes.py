"""scripts/rehearse_recipes.py: its order, its table, and that it goes on where it ended."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from scripts.rehearse_recipes import BREAKS, MAY_NOT, OWN, PASSED, in_order, main
from tests.paths import ROOT
from tests.run_configs import tiny_config


@pytest.fixture
def recipe(tmp_path) -> Path:
    """A recipe of two layers on a GPU of a node."""
    tiny_config(str(tmp_path), "adamw")
    path: Path = tmp_path / "small.yaml"
    content = OmegaConf.load(tmp_path / "config.yaml")
    content.plan = {"gpus": 2, "device": "h100"}
    content.train.sequence_length = 16
    OmegaConf.save(content, path)
    return path


def test_own_layouts_come_first_and_then_one_of_each_kind():
    names = ("gpt1.4b_adamw", "gpt160m_adamw", "gpt160m_sso", "llama70b_sso", "tiny_muon")
    paths = [ROOT / "configs" / f"{name}.yaml" for name in names]
    found = [(path.stem, cut) for path, cut in in_order(paths, ["tensor", "context"])]
    assert found[: len(names)] == [
        ("tiny_muon", OWN),
        ("gpt160m_adamw", OWN),
        ("gpt1.4b_adamw", OWN),
        ("gpt160m_sso", OWN),
        ("llama70b_sso", OWN),
    ]
    kinds = ["gpt160m_adamw", "gpt160m_sso", "llama70b_sso"]
    assert found[5:11] == [(name, cut) for name in kinds for cut in ("tensor", "context")]
    assert {name for name, _ in found[11:]} == {"tiny_muon", "gpt1.4b_adamw"}
    assert len(found) == len(set(found)) == 15


def test_what_is_done_is_kept_and_what_broke_is_tried_again(recipe, processes, tmp_path, capsys):
    file = tmp_path / "rehearsals.json"
    arguments = [str(recipe), "--cuts", "expert", "--json", str(file)]
    assert main(arguments) == 0
    cut, own = json.loads(file.read_text())["rows"]  # what may not be is named first
    assert (own["cut"], own["outcome"], own["gpus"], own["ranks"]) == (OWN, PASSED, 2, 1)
    assert own["processor_seconds"] > 0 and own["peak_gib"] > 0 and own["launches"] > 0
    assert own["host_reads"] == own["synchronizations"] == 0
    assert (cut["cut"], cut["outcome"]) == ("expert", MAY_NOT)
    assert cut["reason"] == "parallel.expert must be 1 for model.family llama, got 2"

    # As if the one had broken, and the other had taken a year.
    figures = json.loads(file.read_text())
    figures["rows"][1]["seconds"] = 3e7
    figures["rows"][0] |= {"outcome": BREAKS, "reason": "out of memory"}
    file.write_text(json.dumps(figures))
    capsys.readouterr()
    assert main(arguments) == 0
    again = {row["cut"]: row for row in json.loads(file.read_text())["rows"]}
    assert again[OWN]["seconds"] == 3e7 and again["expert"]["outcome"] == MAY_NOT
    said = capsys.readouterr().out
    assert "small own: " not in said and f"small expert: {MAY_NOT}" in said

    # Another config is another rehearsal.
    content = OmegaConf.load(recipe)
    content.plan.gpus = 4
    OmegaConf.save(content, recipe)
    assert main(arguments) == 0
    again = {row["cut"]: row for row in json.loads(file.read_text())["rows"]}
    assert again[OWN]["gpus"] == 4 and again[OWN]["seconds"] < 3e7


def test_a_run_that_would_break_is_in_the_table(recipe, processes, tmp_path, capsys):
    device = tmp_path / "small_device.yaml"
    device.write_text("{base: h100, name: small, memory_bytes: 300000}")
    content = OmegaConf.load(recipe)
    content.plan.device = str(device)
    OmegaConf.save(content, recipe)
    assert main([str(recipe), "--cuts"]) == 1
    assert f"small own: {BREAKS}: out of memory in" in capsys.readouterr().out


def test_another_file_is_left_alone(recipe, tmp_path, capsys):
    file = tmp_path / "other.json"
    file.write_text('{"losses": [1, 2]}')
    assert main([str(recipe), "--json", str(file)]) == 2
    assert "--json must name a file that this command wrote" in capsys.readouterr().err
    assert file.read_text() == '{"losses": [1, 2]}'
