"""Plans, searches and rehearsals warn about paths that a run needs but that do not exist on this
machine."""

from pathlib import Path

import pytest

import pretrain
from tests.paths import ROOT
from training.config import load_config
from training.planning.plan_commands import warn

KEYS = ["model.vocab_size=4096", "data.mock=true"]


def warnings(capsys: pytest.CaptureFixture[str], *keys: str) -> str:
    """Return the warnings about a config."""
    warn(load_config(ROOT / "configs/tiny_muon.yaml", list(keys)))
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "missing"),
    [
        (["data.tokenizer=no/tokenizer.json"], "data.tokenizer (no/tokenizer.json)"),
        (["data.validation.own.path=no/own"], "data.validation.own.path (no/own.idx)"),
        (["tasks.files.arc=no/arc.jsonl"], "tasks.files.arc (no/arc.jsonl)"),
    ],
)
def test_missing_paths_are_named(keys, missing, capsys):
    said = warnings(capsys, "model.vocab_size=4096", *keys)
    assert said.count("\n") == 1 and "a run requires files that do not exist here: " in said
    assert missing in said
    assert warnings(capsys, *KEYS, *keys) == ""  # mock tokens need none of these files


@pytest.mark.parametrize("command", ["--dry-run", "--fit"])
def test_every_plan_warns(command, capsys):
    keys = ["model.vocab_size=4096", "data.tokenizer=no/tokenizer.json"]
    config = str(ROOT / "configs/tiny_muon.yaml")
    assert pretrain.main(["--config", config, *keys, command, "--gpus", "1"]) == 0
    assert "data.tokenizer (no/tokenizer.json)" in capsys.readouterr().err


def test_initial_weights_that_a_run_would_refuse_are_named(capsys, tmp_path: Path):
    assert "a new run would fail: checkpoint.initialize_from: no/run does not exist" in warnings(
        capsys, *KEYS, "checkpoint.initialize_from=no/run"
    )
    assert f"{tmp_path} contains no checkpoint" in warnings(
        capsys, *KEYS, f"checkpoint.initialize_from={tmp_path}"
    )
    # Without a vocabulary size, as in a rehearsal, the path is checked, too.
    config = f"checkpoint.initialize_from={tmp_path}"
    assert "contains no checkpoint" in warnings(capsys, "data.mock=true", config)
