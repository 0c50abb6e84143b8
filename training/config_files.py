"""Config files: a YAML file merged over its bases, and dotted overrides merged over both.

`base: other.yaml` (or a list of files, later ones winning) is relative to the file that says it.
Mappings are merged, lists and scalars replaced. `${section.key}` refers to the merged result.
"""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from training.config_binding import InvalidConfigError


def read_merged(path: Path, overrides: Sequence[str] = ()) -> dict[str, object]:
    """The plain mapping that `path`, its bases and the `key=value` overrides describe.

    Raises InvalidConfigError for a file, an override or a reference that cannot be read.
    """
    merged = OmegaConf.merge(_read(path, ()), *map(_override, overrides))
    try:
        plain = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise InvalidConfigError([f"{_shown(path)}: {_one_line(error)}"]) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _override(text: str) -> DictConfig:
    """The mapping that one `dotted.key=value` describes; the value is read as YAML."""
    key, equals, _ = text.partition("=")
    if not equals or not all(key.split(".")):
        raise InvalidConfigError([f"an override must be key=value, got {text!r}"])
    try:
        return OmegaConf.from_dotlist([text])
    except (YAMLError, OmegaConfBaseException) as error:
        raise InvalidConfigError(
            [f"override {text!r} is not valid YAML: {_one_line(error)}"]
        ) from error


def _read(path: Path, chain: tuple[Path, ...]) -> DictConfig:
    """The mapping of `path` merged over its bases; `chain` is the files that led here."""
    path = path.resolve()
    if path in chain:
        loop = " -> ".join(_shown(p) for p in (*chain[chain.index(path) :], path))
        raise InvalidConfigError([f"base files form a cycle: {loop}"])
    try:
        own = OmegaConf.load(path)
    except OSError as error:
        by = f", the base of {_shown(chain[-1])}" if chain else ""
        raise InvalidConfigError(
            [f"cannot read config {_shown(path)}{by}: {error.strerror}"]
        ) from error
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise InvalidConfigError(
            [f"{_shown(path)} is not valid YAML: {_one_line(error)}"]
        ) from error
    if not isinstance(own, DictConfig):
        raise InvalidConfigError([f"{_shown(path)} must hold a mapping of sections, got a list"])
    bases = _bases(own.pop("base", None), path)
    merged = OmegaConf.merge(*(_read(base, (*chain, path)) for base in bases), own)
    assert isinstance(merged, DictConfig)
    return merged


def _bases(value: object, path: Path) -> list[Path]:
    """The files that the `base` entry of `path` names."""
    if value is None:
        return []
    names = value if isinstance(value, ListConfig) else [value]
    if not all(isinstance(name, str) for name in names):
        raise InvalidConfigError(
            [f"base in {_shown(path)} must be a file or a list of files, got {value}"]
        )
    return [path.parent / str(name) for name in names]


def _shown(path: Path) -> str:
    """`path` relative to the working directory where it lies inside it."""
    path = path.resolve()
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
