"""The run config: from a YAML file to frozen sections, with all problems reported at once.

schema.py and sections/ hold the fields and what must hold in each section, checks.py what must
hold between sections; files.py and binding.py read YAML, removed.py says what to do about removed
keys, and manual.py writes docs/configuration.md. Nothing here knows the engine or a device. Start
with schema.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import yaml

from training.config.binding import InvalidConfigError, bind
from training.config.checks import SECTION_CHECKS, problems_between, world
from training.config.files import Content, escaped, places_of, read_merged, read_saved
from training.config.paper_choices import with_paper_choices
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

NAMED_SECTIONS: Final = (
    ("data", "train"),
    ("data", "validation"),
    ("optimizer", "roles"),
    ("pc", "overrides"),
)
"""Where sections have names of their own, of which null leaves one out."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config that the YAML file `path`, its bases and `key=value` overrides describe.

    Raises InvalidConfigError, whose `problems` lists everything that is wrong.
    """
    content = read_merged(Path(path), overrides)
    problems = list(foreign_nulls(content, Path(path), overrides))
    try:
        config = checked(content)
    except InvalidConfigError as error:
        raise InvalidConfigError([*problems, *error.problems]) from None
    if problems:
        raise InvalidConfigError(problems)
    return with_paper_choices(config)


def checked(content: Content) -> Config:
    """Return the config that nested mappings describe; raises InvalidConfigError."""
    config = bind(Config, without_nulls(content), SECTION_CHECKS)
    if problems := list(problems_between(config)):
        raise InvalidConfigError(problems)
    return config


def without_nulls(content: Content) -> Content:
    """Return `content` without the named sections that are null."""
    content = {**content}
    for section, kind in NAMED_SECTIONS:
        outer = content.get(section)
        if isinstance(outer, Mapping) and kind in outer:
            inner = {} if outer[kind] is None else outer[kind]
            if isinstance(inner, Mapping):
                inner = {name: value for name, value in inner.items() if value is not None}
            content[section] = {**outer, kind: inner}
    return content


def foreign_nulls(content: Content, path: Path, overrides: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each named section that is null, which leaves it out, but that no file
    and no override gives."""
    for section, kind in NAMED_SECTIONS:
        outer = content.get(section)
        found = outer.get(kind) if isinstance(outer, Mapping) else None
        names = found if isinstance(found, Mapping) else {}
        for name in [name for name, value in names.items() if value is None]:
            if next(places_of(path, overrides, (section, kind, str(name))), None) is None:
                yield (
                    f"{section}.{kind}.{name} is null, which leaves out what a base has under that "
                    "name, but none has it"
                )


def load_saved_config(path: str | Path) -> Config:
    """Return the config that `to_yaml` wrote to `path`, here or in an earlier version.

    An absent key has its default, and only keys, types and bounds are checked: a rule that a later
    version has must not make a checkpoint unreadable. Raises InvalidConfigError for a file that is
    not a run config or that has removed keys.
    """
    return with_paper_choices(bind(Config, without_nulls(read_saved(Path(path)))))


def check(config: Config, world_size: int) -> None:
    """Check that `config` is valid and can run on `world_size` ranks.

    Raises InvalidConfigError, whose `problems` lists everything that is wrong.
    """
    problems = list(world(checked(asdict(config)), world_size))
    if problems:
        raise InvalidConfigError(problems)


def to_yaml(config: Config) -> str:
    """Return `config` as YAML with every default written out; loading it gives an equal config."""
    return yaml.safe_dump(escaped(asdict(config)), sort_keys=False, allow_unicode=True)
