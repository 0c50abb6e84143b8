"""The run config: from a YAML file to frozen sections, with all problems reported at once.

schema.py and sections/ hold the fields and what must hold in each section, checks/ what must hold
between sections; files.py and binding.py read YAML, renamed.py old names, and manual.py writes
docs/configuration.md. Nothing here knows the engine or a device. Start with schema.py.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from omegaconf import OmegaConf

from training.config.binding import Binder, InvalidConfigError, walk_problems
from training.config.checks import SECTION_CHECKS, problems_between
from training.config.checks.layout import world
from training.config.files import read_merged
from training.config.renamed import translate
from training.config.schema import Config
from training.config.sections.optimizer import group_of

__all__ = [
    "Config",
    "InvalidConfigError",
    "check",
    "group_of",
    "load_config",
    "load_saved_config",
    "to_yaml",
]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config that the YAML file `path`, its bases and `key=value` overrides describe.

    Raises InvalidConfigError, whose `problems` lists everything that is wrong.
    """
    content, problems = translate(read_merged(Path(path), overrides))
    binder = Binder(Config, SECTION_CHECKS)
    config = binder.bind(Config, content)
    problems += binder.problems
    if config is not None:
        problems += problems_between(config)
    if config is None or problems:
        raise InvalidConfigError(problems)
    return config


def load_saved_config(path: str | Path) -> Config:
    """Return the config that `to_yaml` wrote to `path`, here or in an earlier version.

    Old names are translated, an absent key has its default, and only keys and types are checked: a
    setting that a later version refuses must not make a checkpoint unreadable. Raises
    InvalidConfigError for a file that is not a run config.
    """
    content, _ = translate(read_merged(Path(path)))
    binder = Binder(Config)
    config = binder.bind(Config, content)
    if config is None:
        raise InvalidConfigError(binder.problems)
    return config


def check(config: Config, world_size: int) -> None:
    """Check that `config` is valid and can run on `world_size` ranks.

    Raises InvalidConfigError, whose `problems` lists everything that is wrong.
    """
    problems = list(walk_problems(config, SECTION_CHECKS))
    if not problems:
        problems = [*problems_between(config), *world(config, world_size)]
    if problems:
        raise InvalidConfigError(problems)


def to_yaml(config: Config) -> str:
    """Return `config` as YAML with every default written out; loading it gives an equal config."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))
