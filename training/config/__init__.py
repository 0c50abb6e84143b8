"""The run config: from a YAML file to frozen sections, with everything that is wrong said at once.

sections/ holds the fields and what must hold in each section, checks/ what must hold between them,
binding.py and files.py the way from YAML, manual.py the way to docs/configuration.md. Nothing here
knows the engine or a device. Start with schema.py.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from omegaconf import OmegaConf

from training.config.binding import Binder, InvalidConfigError, walk_problems
from training.config.checks import SECTION_CHECKS, problems_between
from training.config.checks.layout import world
from training.config.files import read_merged
from training.config.schema import Config
from training.config.sections.optimizer import group_of

__all__ = ["Config", "InvalidConfigError", "check", "group_of", "load_config", "to_yaml"]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config that the YAML file `path`, its bases and `key=value` overrides describe.

    Raises InvalidConfigError, a ConfigError whose `problems` names everything that is wrong.
    """
    binder = Binder(Config, SECTION_CHECKS)
    config = binder.bind(Config, read_merged(Path(path), overrides))
    if config is None:
        raise InvalidConfigError(binder.problems)
    problems = list(problems_between(config))
    if problems:
        raise InvalidConfigError(problems)
    return config


def check(config: Config, world_size: int) -> None:
    """Check that `config` is sound and can run on `world_size` ranks.

    Raises InvalidConfigError whose `problems` names everything that is wrong.
    """
    problems = list(walk_problems(config, SECTION_CHECKS))
    if not problems:
        problems = [*problems_between(config), *world(config, world_size)]
    if problems:
        raise InvalidConfigError(problems)


def to_yaml(config: Config) -> str:
    """Return `config` as YAML with every default written out; loading it gives an equal config."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))
