"""Removed keys: each is answered by one line that says what to do."""

from pathlib import Path

import pytest
import yaml

import pretrain
from tests.minimal_config import problems
from training.config import InvalidConfigError, load_config, load_saved_config, to_yaml
from training.config.binding import schema_paths
from training.config.removed import REMOVED, removal
from training.config.schema import Config


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_key_is_answered_by_its_own_line(
    minimal: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key, _, value = name.replace("*", "muon_sphere").partition("=")
    override = f"{key}={value or 3}"
    expected = removal(override if value else key)
    assert expected is not None
    assert problems(minimal, override) == [expected]
    assert pretrain.main(["--config", str(minimal), override]) == 2
    assert [line for line in capsys.readouterr().err.splitlines() if expected in line]


def test_a_saved_config_with_a_removed_key_is_refused_by_its_name(minimal: Path) -> None:
    saved = yaml.safe_load(to_yaml(load_config(minimal)))
    saved["optimizer"]["rules"]["muon_sphere"]["power_iteration_steps"] = 10
    minimal.write_text(yaml.safe_dump(saved))
    with pytest.raises(InvalidConfigError, match=r"muon_sphere\.power_iteration_steps was removed"):
        load_saved_config(minimal)


def test_no_key_is_both_there_and_removed() -> None:
    paths = {path for path, _ in schema_paths(Config)}
    assert not paths & set(REMOVED)
