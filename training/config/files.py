"""Reading config files: a YAML file merged over its bases, then dotted overrides.

`base: other.yaml`, or a list of files of which later ones win, is relative to the file itself.
Sections are merged, lists and single values replaced; a section with `replace: true` takes nothing
from the base's. `${section.key}` refers to the merged result,
and `${oc.env:NAME}` to the environment, where a key is a path. A config that a run has saved may
come from somebody else: `read_saved` reads it, and nothing in it refers to anything.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Any, Final, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from training.config.binding import NAMED_SECTIONS, InvalidConfigError, join

Content = Mapping[Any, Any]

REPLACE: Final = "replace"
"""Key of a section that takes nothing from the same section of the base."""

ENVIRONMENT_KEYS: Final = (
    "run.dir",
    "data.tokenizer",
    "data.train.*.path",
    "data.validation.*.path",
    "checkpoint.initialize_from",
)
"""Keys whose values may use `${oc.env:NAME}`."""

LARGEST: Final = 1 << 18
"""Bytes of a config file."""
MOST_VALUES: Final = 100_000
"""Values of a config file, those of a YAML alias counted each time."""
MOST_FILES: Final = 64
"""Files of one config, a base that several name counted each time."""

_RESOLVER: Final = re.compile(r"(?<!\\)(?:\\\\)*\$\{\s*(\$\{|[^}$]*:)")
_OLD_NUMBER: Final = re.compile(
    r"[-+]?(0[0-7_]+|0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"
    r"|(?=\.?[0-9].*_)[0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?)"
)
_ESCAPED: Final = re.compile(r"(\\*)\\\$\{")
# What yaml and OmegaConf raise for a text that they cannot read; ValueError for a huge number.
_UNREADABLE: Final = (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError)


def read_merged(path: Path, overrides: Sequence[str] = ()) -> Content:
    """Return the plain mapping that `path`, its bases and the `key=value` overrides describe.

    Raises InvalidConfigError for a file, an override or a reference that cannot be read.
    """
    try:
        merged = reduce(over, map(_override, overrides), _read(path, (), []))
        problems = list(_foreign_references(merged))
        if problems:
            raise InvalidConfigError(problems)
        resolved = OmegaConf.to_container(OmegaConf.create(dict(merged)), resolve=True)
    except _UNREADABLE as error:
        if isinstance(error, InvalidConfigError):
            raise
        raise InvalidConfigError([f"{_shown(path)}: {_one_line(error)}"]) from error
    assert isinstance(resolved, dict)
    return resolved


def merged_overrides(overrides: Sequence[str]) -> Content:
    """Return the nested mapping that `key=value` overrides describe, later ones on top.

    Raises InvalidConfigError for an override that cannot be read.
    """
    return reduce(over, map(_override, overrides), {})


def place_of(path: Path, overrides: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the strongest place that gives the key `names`, outermost first, another value than
    null: `FILE, line N` or `the override KEY=VALUE`, of what `read_merged` has read."""
    for text in reversed(overrides):
        if _at(_override(text), names) is not None:
            return f"the override {text}"
    content = _load(path)
    if _at(content, names) is not None:
        line = _line_of(yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader), names)
        return _shown(path) + (f", line {line}" if line else "")
    bases = reversed(_bases(content.get("base"), path))
    return next(filter(None, (place_of(base.resolve(), (), names) for base in bases)), None)


def _at(content: Any, names: Sequence[str]) -> Any:
    """The value under nested keys, None if there is none."""
    for name in names:
        content = content.get(name) if isinstance(content, Mapping) else None
    return content


def _line_of(node: yaml.Node | None, names: Sequence[str]) -> int | None:
    """The line of a key in a file, from 1 on; None if it is not written there as a key."""
    line = None
    for name in names:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = [(key, value) for key, value in pairs if key.value == name]
        if not found:
            return None
        key, node = found[-1]
        line = key.start_mark.line + 1
    return line


def over(below: Content, above: Content, path: str = "") -> Content:
    """Return `above` merged over `below`: mappings are merged, other values replaced.

    A mapping with `replace: true` replaces the one below, and null leaves a named section out.
    `path` is where the mappings are in the config. Raises InvalidConfigError for another value of
    `replace`.
    """
    replace = above.get(REPLACE, False)
    if REPLACE in above and replace is not True:
        raise InvalidConfigError([f"{join(path, REPLACE)} must be true, got {replace!r:.80}"])
    merged = {} if replace else dict(below)
    for key, value in above.items():
        name = join(path, str(key))
        if isinstance(value, Mapping):
            old = merged.get(key)
            value = over(old if isinstance(old, Mapping) else {}, value, name)
        if value is None and path in NAMED_SECTIONS and key in merged:
            del merged[key]
        elif key != REPLACE:
            merged[key] = {} if value is None and name in NAMED_SECTIONS else value
    return merged


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of every leaf of nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_saved(path: Path) -> Content:
    """Return the plain mapping that a run has saved, in which nothing refers to anything.

    Raises InvalidConfigError for a file that cannot be read.
    """
    return cast(Content, _with_strings(_load(path), unescaped))


def escaped(value: Any) -> Any:
    """Return nested plain values with each `${` escaped, so that it refers to nothing."""
    return _with_strings(value, lambda text: re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def unescaped(text: str) -> str:
    """Return what `escaped` was given."""
    return _ESCAPED.sub(lambda match: match[1][: len(match[1]) // 2] + "${", text)


def _with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Nested plain values with each string but keys changed."""
    if isinstance(value, Mapping):
        return {key: _with_strings(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_strings(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


def _foreign_references(content: Any, path: str = "") -> Iterator[str]:
    """Yield a sentence for each value that refers to anything but other keys, and may not."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _foreign_references(value, join(path, str(key)))
    elif isinstance(content, list):
        for value in content:
            yield from _foreign_references(value, path)
    elif isinstance(content, str):
        for match in _RESOLVER.finditer(content):
            allowed = any(fnmatchcase(path, key) for key in ENVIRONMENT_KEYS)
            if match[1].strip() != "oc.env:" or not allowed:
                yield (
                    f"{path} must not use {match[0]!r}: only ${{oc.env:NAME}} is allowed, in keys "
                    "that are paths"
                )


def _override(text: str) -> Content:
    """The mapping that one `dotted.key=value` describes, its value read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise InvalidConfigError([f"an override must be key=value, got {text!r:.80}"])
    try:
        if _after(value).strip():
            raise yaml.YAMLError("what follows # is a comment; put a text with # in quotes")
        _check_numbers(value)
        return _plain(OmegaConf.from_dotlist([text]))
    except _UNREADABLE as error:
        problem = f"override {text!r:.80} is not valid YAML: {_one_line(error)}"
        raise InvalidConfigError([problem]) from error


def _read(path: Path, chain: tuple[Path, ...], opened: list[Path]) -> Content:
    """The mapping of `path` merged over its bases; `chain` has the files that led to it, `opened`
    all files that were read."""
    path = path.resolve()
    if path in chain:
        loop = " -> ".join(_shown(p) for p in (*chain[chain.index(path) :], path))
        raise InvalidConfigError([f"base files form a cycle: {loop}"])
    opened.append(path)
    if len(opened) > MOST_FILES:
        raise InvalidConfigError([f"{_shown(opened[0])} has more than {MOST_FILES} base files"])
    own = dict(_load(path, f", the base of {_shown(chain[-1])}" if chain else ""))
    bases = _bases(own.pop("base", None), path)
    return reduce(over, [*(_read(base, (*chain, path), opened) for base in bases), own], {})


def _load(path: Path, origin: str = "") -> Content:
    """The plain mapping in one file, references not resolved; `origin` says what named the file."""
    try:
        if path.exists() and not path.is_file():
            raise InvalidConfigError([f"config {_shown(path)}{origin} must be a file"])
        if path.stat().st_size > LARGEST:
            size = path.stat().st_size
            raise InvalidConfigError(
                [f"config {_shown(path)}{origin} must have at most {LARGEST} bytes, got {size}"]
            )
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, yaml.SafeLoader)
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise InvalidConfigError([f"{_shown(path)} must hold a mapping of sections"])
        if root is not None and _values(root, {}) > MOST_VALUES:
            raise yaml.YAMLError(f"its aliases describe more than {MOST_VALUES} values")
        _check_numbers(text)
        content = OmegaConf.create(text)
    except OSError as error:
        problem = f"cannot read config {_shown(path)}{origin}: {error.strerror or error}"
        raise InvalidConfigError([problem]) from error
    except _UNREADABLE as error:
        if isinstance(error, InvalidConfigError):
            raise
        problem = f"{_shown(path)} is not valid YAML: {_one_line(error)}"
        raise InvalidConfigError([problem]) from error
    assert isinstance(content, DictConfig)
    return _plain(content)


def _after(value: str) -> str:
    """What follows the YAML in a text with one value: spaces, or a comment."""
    ends = yaml.StreamEndToken, yaml.BlockEndToken
    tokens = [each for each in yaml.scan(value, yaml.SafeLoader) if not isinstance(each, ends)]
    return value[tokens[-1].end_mark.index :]


def _check_numbers(text: str) -> None:
    """Raise YAMLError for 010, 1:30 and 1_0, which YAML 1.1 reads as 8, 90 and 10."""
    for token in yaml.scan(text, yaml.SafeLoader):
        if not isinstance(token, yaml.ScalarToken) or not token.plain:
            continue
        if _OLD_NUMBER.fullmatch(token.value):
            raise yaml.YAMLError(f"a number must be decimal or a text in quotes, got {token.value}")


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """The values that a node describes, those of an alias counted each time; too many for one that
    has itself inside. `known` has what was counted so far, by node."""
    if id(node) not in known:
        known[id(node)] = MOST_VALUES + 1  # for an alias inside
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        known[id(node)] = 1 + sum(_values(each, known) for each in inner)
    return known[id(node)]


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
    """What an error says, in one line."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error).split())
