"""The run config, read from YAML into frozen dataclasses. All problems are reported at once.

schema.py, data.py, schedule.py and optimizer_section.py define the sections. checks.py defines the
cross-section checks. yaml_files.py and binding.py read YAML. manual.py generates
docs/configuration.md. Nothing in this folder depends on megatron-core. Read schema.py first.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from training.config.binding import InvalidConfigError, bind
from training.config.checks import BETWEEN, world
from training.config.optimizer_section import MissingRuleError, group_of, of_installed_rules
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
    """Load the config from the YAML file `path` and its bases, and apply `key=value` overrides.

    Raises InvalidConfigError, whose `problems` lists every problem found.
    """
    return with_paper_choices(bind(Config, read_merged(Path(path), overrides), BETWEEN))


def load_saved_config(path: str | Path) -> Config:
    """Load the config written to `path` by `to_yaml` of this or an earlier version.

    Missing keys are set to their defaults. Only keys, types and bounds are checked, so that checks
    added in later versions do not make old checkpoints unreadable. Raises MissingRuleError if a
    rule used by the run is not installed, and InvalidConfigError if the file is not a run config or
    contains unknown keys.
    """
    content = read_saved(Path(path))
    match content:  # `storage` is obsolete and never affected results
        case {"optimizer": {"distributed": {"storage": str(), **others}, **sections}}:
            content = {**content, "optimizer": {**sections, "distributed": others}}
    return with_paper_choices(bind(Config, of_installed_rules(content), check=False))


def check(config: Config, world_size: int, step: int = 0, tokens: int = 0) -> None:
    """Check `config` for a run that resumes after `step` steps and `tokens` tokens on `world_size`
    ranks.

    Raises InvalidConfigError, whose `problems` lists every problem found.
    """
    if lines := list(world(bind(Config, asdict(config), BETWEEN), world_size, step, tokens)):
        raise InvalidConfigError(lines)


def to_yaml(config: Config) -> str:
    """Serialize `config` to YAML, including all defaults. Loading the YAML gives an equal
    config."""
    return to_text(asdict(config))
