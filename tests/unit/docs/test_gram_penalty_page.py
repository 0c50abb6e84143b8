"""docs/gram_penalty.md is true: its commands are understood, its metrics are logged."""

import re
import shlex
from functools import reduce

import pretrain
from tests.paths import ROOT
from training.config import load_config
from training.control.penalty_schedule import GramPenalty

PAGE = (ROOT / "docs" / "gram_penalty.md").read_text()
COMMANDS = re.findall(r"^    python pretrain.py (.*)$", PAGE, re.MULTILINE)


def test_every_command_is_understood():
    assert len(COMMANDS) == 6
    for command in COMMANDS:
        options = pretrain.parse(shlex.split(command))
        assert load_config(ROOT / options.config, options.overrides).gram_penalty is not None


def test_keys_in_the_text_exist():
    config = load_config(ROOT / "configs" / "tiny_gpt_muon_gram.yaml", ["pc.level=2"])
    names = set(re.findall(r"`((?:gram_penalty|optimizer|pc)(?:\.[a-z_]+)+)", PAGE))
    assert len(names) >= 5
    for name in names:
        reduce(getattr, name.split("."), config)


def test_its_metrics_are_those_logged():
    logged = re.findall(r"penalty/\w+", GramPenalty.metrics.__doc__ or "")
    assert re.findall(r"^\| `(penalty/\w+)`", PAGE, re.MULTILINE) == logged
