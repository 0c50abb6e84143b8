"""Reading config files: a YAML file merged over its bases, then dotted overrides.

`base: other.yaml`, or a list of files of which later ones win, is relative to the file itself.
Sections are merged, lists and single values replaced. `${section.key}` refers to the merged result.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from training.config.binding import InvalidConfigError

Content = Mapping[Any, Any]


def read_merged(path: Path, overrides: Sequence[str] = ()) -> Content:
    """Return the plain mapping that `path`, its bases and the `key=value` overrides describe.

    Raises InvalidConfigError for a file, an override or a reference that cannot be read.
    """
    merged = reduce(_over, map(_override, overrides), _read(path, ()))
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(dict(merged)), resolve=True)
    except OmegaConfBaseException as error:
        raise InvalidConfigError([f"{_shown(path)}: {_one_line(error)}"]) from error
    assert isinstance(resolved, dict)
    return resolved


def _over(below: Content, above: Content) -> Content:
    """`above` merged over `below`."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        sections = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _over(cast(Content, old), cast(Content, value)) if sections else value
    return merged


def _override(text: str) -> Content:
    """The mapping that one `dotted.key=value` describes, its value read as YAML."""
    key, equals, _ = text.partition("=")
    if not equals or not all(key.split(".")):
        raise InvalidConfigError([f"an override must be key=value, got {text!r}"])
    try:
        return _plain(OmegaConf.from_dotlist([text]))
    except (YAMLError, OmegaConfBaseException) as error:
        problem = f"override {text!r} is not valid YAML: {_one_line(error)}"
        raise InvalidConfigError([problem]) from error


def _read(path: Path, chain: tuple[Path, ...]) -> Content:
    """The mapping of `path` merged over its bases; `chain` has the files that led to it."""
    path = path.resolve()
    if path in chain:
        loop = " -> ".join(_shown(p) for p in (*chain[chain.index(path) :], path))
        raise InvalidConfigError([f"base files form a cycle: {loop}"])
    try:
        loaded = OmegaConf.load(path)
    except OSError as error:
        by = f", the base of {_shown(chain[-1])}" if chain else ""
        problem = f"cannot read config {_shown(path)}{by}: {error.strerror or error}"
        raise InvalidConfigError([problem]) from error
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        problem = f"{_shown(path)} is not valid YAML: {_one_line(error)}"
        raise InvalidConfigError([problem]) from error
    if not isinstance(loaded, DictConfig):
        raise InvalidConfigError([f"{_shown(path)} must hold a mapping of sections, got a list"])
    own = dict(_plain(loaded))
    bases = _bases(own.pop("base", None), path)
    return reduce(_over, [*(_read(base, (*chain, path)) for base in bases), own])


def _bases(value: object, path: Path) -> list[Path]:
    """The files that the `base` entry of `path` names."""
    if value is None:
        return []
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        problem = f"base in {_shown(path)} must be a file or a list of files, got {value}"
        raise InvalidConfigError([problem])
    return [path.parent / str(name) for name in names]


def _plain(config: DictConfig) -> Content:
    """`config` as plain containers, references not yet resolved."""
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    return plain


def _shown(path: Path) -> str:
    """`path`, relative to the working directory if it lies inside."""
    path = path.resolve()
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
