"""The run config, read from YAML into frozen sections. An error lists all problems at once.

schema.py, data.py, schedule.py and optimizer_section.py contain the fields and the conditions
within sections. checks.py contains the conditions between sections. yaml_files.py and binding.py
read YAML. manual.py writes docs/configuration.md. No file depends on megatron-core. Start with
schema.py.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from training.config.binding import InvalidConfigError, bind
from training.config.checks import BETWEEN, world
from training.config.optimizer_section import (
    MissingRuleError,
    group_of,
    of_installed_rules,
    without_gone_keys,
)
from training.config.schema import Config, with_paper_choices
from training.config.yaml_files import read_merged, read_saved, to_text

__all__ = [
    "Config",
    "InvalidConfigError",
    "MissingRuleError",
    "check",
    "group_of",
    "load_config",
    "load_saved_config",
    "to_yaml",
]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config of the YAML file `path`, its bases and `key=value` overrides.

    Raises InvalidConfigError, whose `problems` lists all problems.
    """
    return with_paper_choices(bind(Config, read_merged(Path(path), overrides), BETWEEN))


def load_saved_config(path: str | Path) -> Config:
    """Return the config that `to_yaml` of this or an earlier version wrote to `path`.

    A missing key has its default. Only keys, types and bounds are checked, because a condition that
    a later version adds must not make checkpoints unreadable. Raises MissingRuleError if a rule of
    the run is not installed, InvalidConfigError if the file is not a run config or contains unknown
    keys.
    """
    content = of_installed_rules(without_gone_keys(read_saved(Path(path))))
    return with_paper_choices(bind(Config, content, check=False))


def check(config: Config, world_size: int, step: int = 0, tokens: int = 0) -> None:
    """Check that `config` is valid and can continue after `step` steps and `tokens` tokens on
    `world_size` ranks.

    Raises InvalidConfigError, whose `problems` lists all problems.
    """
    if lines := list(world(bind(Config, asdict(config), BETWEEN), world_size, step, tokens)):
        raise InvalidConfigError(lines)


def to_yaml(config: Config) -> str:
    """Return `config` as YAML, including all defaults. Loading the YAML returns an equal config."""
    return to_text(asdict(config))
