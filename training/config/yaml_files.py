"""Read config files: merge a YAML file over its bases, then apply overrides.

`base` is a file or a list of files in ascending priority; paths are relative to the file containing
`base`. Sections are merged; lists and scalars are replaced. A section with `replace: true` inherits
nothing from the base. `${section.key}` refers to the merged result. `${oc.env:NAME}` expands to an
environment variable and is allowed only in keys that hold paths. `read_saved` does not resolve
references, because a saved config may come from an untrusted source.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import lru_cache, reduce
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from models.section import join
from training.config.binding import NAMED_SECTIONS, InvalidConfigError
from training.errors import near_name
from training.json_file import read_regular, real_path

Content = Mapping[Any, Any]

REPLACE: Final = "replace"
"""If true, this key keeps a section from inheriting anything from the base."""

ENVIRONMENT_KEYS: Final = ("run.dir", "data.tokenizer", "data.*.path", "checkpoint.initialize_from")
"""Keys whose values may use `${oc.env:NAME}`."""

LARGEST: Final = 1 << 18
"""Maximum size of a config file, in bytes."""
MOST_VALUES: Final = 100_000
"""Maximum number of values in a config file. The values in an alias count again each time the alias
is used."""
MOST_FILES: Final = 64
"""Maximum number of files in a config. If several files share a base, the base counts once per
file."""

_RESOLVER: Final = re.compile(r"(?<!\\)(?:\\\\)*\$\{\s*(\$\{|[^}$]*:)")
_OLD_NUMBER: Final = re.compile(
    r"[-+]?(0[0-7_]+|0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"
    r"|(?=\.?[0-9].*_)[0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?)"
)
_SCALARS: Final = (":bool", ":int", ":float", ":timestamp")
"""Suffixes of the YAML tags of scalar values."""
_NUMBER: Final = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
"""Literals such as 1e5, which OmegaConf reads as a number but YAML 1.1 may read as a string."""
_TOO_SMALL: Final = re.compile(r"[-+]?(?=[0.]*[1-9])([0-9]+\.?[0-9]*|\.[0-9]+)[eE]-[0-9]+")
"""Literals of nonzero numbers that may underflow to 0.0."""


# PyYAML's C loader and dumper, which are included in its wheels.
_SafeLoader: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SafeDumper: Final[Any] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_SafeDumper):
    """YAML dumper that quotes strings that look like numbers."""


for _pattern in (_NUMBER.pattern, _OLD_NUMBER.pattern):  # strings like these must be quoted
    _Dumper.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(f"({_pattern})$"), list("-+.0123456789")
    )


def read_merged(path: Path, overrides: Sequence[str] = ()) -> Content:
    """Merge `path`, its bases and the `key=value` overrides into one plain mapping.

    Raises InvalidConfigError if a file, an override or a reference is invalid.
    """
    with _readable(_shown(path)):
        merged = _merged(content for _, content in _sources(path, overrides))
        if lines := list(_foreign_references(merged)):
            raise InvalidConfigError(lines)
        return cast(Content, OmegaConf.to_container(OmegaConf.create(dict(merged)), resolve=True))


def _sources(path: Path, overrides: Sequence[str]) -> list[tuple[str | Path, Content]]:
    """Return a (source, mapping) pair per file and override of a config, in ascending priority."""
    files = list(islice(_files(path), MOST_FILES + 1))
    if len(files) > MOST_FILES:
        problem = f"{_shown(path)} and its bases must not exceed {MOST_FILES} files"
        raise InvalidConfigError([problem])
    return [*files, *((text, _override(text)) for text in overrides)]


@contextmanager
def _readable(prefix: str) -> Iterator[None]:
    """Turn errors from yaml, OmegaConf and int (for huge numbers) into InvalidConfigError."""
    try:
        yield
    except InvalidConfigError:
        raise
    except RecursionError as error:
        raise InvalidConfigError([f"{prefix}: too many nested levels"]) from error
    except UnicodeDecodeError as error:
        byte = f"byte {error.object[error.start]:#04x} at offset {error.start}"
        raise InvalidConfigError([f"{prefix}: the text must be UTF-8, got {byte}"]) from error
    except InterpolationKeyError as error:
        problem = f"{error.full_key} refers to a missing key ({str(error).splitlines()[0]})"
        rule = "only keys set in a file or an override can be referred to, not keys with defaults"
        raise InvalidConfigError([f"{prefix}: {problem}; {rule}"]) from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        text = " ".join(str(error).split()).replace('in "<unicode string>", line', "at line")
        raise InvalidConfigError([f"{prefix}: {text}"]) from error


def merged_overrides(overrides: Sequence[str]) -> Content:
    """Merge `key=value` overrides into a nested mapping. The last value of each key wins.

    Raises InvalidConfigError if an override is invalid.
    """
    return _merged(map(_override, overrides))


def _merged(contents: Iterable[Content]) -> Content:
    """Merge mappings in ascending priority."""
    return reduce(over, contents, {})


def replaced(overrides: Sequence[str]) -> Iterator[str]:
    """Yield a message for each override whose value is changed or removed by a later override."""
    contents = list(map(_override, overrides))
    states = [_merged(contents[: i + 1]) for i in range(len(contents))]
    for i, text in enumerate(overrides):
        keys = [key.split(".") for key, _ in flat(contents[i])]
        for later in range(i + 1, len(overrides)):
            changes = ((_value(states[i], key), _value(states[later], key)) for key in keys)
            # Filling a section emptied by an earlier override does not count as replacing it.
            if any(
                now != old and not isinstance(now if old is None else old, Mapping)
                for old, now in changes
            ):
                yield f"override {overrides[later]} replaces override {text}"
                break


def _value(content: Any, names: Sequence[str]) -> Any:
    """Return the value of the key with the given names, outermost first, or None."""
    for name in names:
        content = content.get(name) if isinstance(content, Mapping) else None
    return content


def own_keys(path: Path, overrides: Sequence[str]) -> set[str]:
    """Return the dotted keys set in `path` or by an override, without keys set only in bases."""
    sources = _sources(path, overrides)
    contents = (content for source, content in sources if source in (real_path(path), *overrides))
    return {key for content in contents for key, _ in flat(content)}


def check_not_read(path: Path, option: str, output: Path) -> None:
    """Raise InvalidConfigError if the file `output` is `path` or one of its bases. `option` is the
    command-line option that sets `output`."""
    if real_path(output) in (file for file, _ in _files(path)):
        rule = "must not overwrite a file of the config"
        raise InvalidConfigError([f"{option} {rule}, got {output}"])


def place_of(path: Path, overrides: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the place where a config key is set: `FILE, line N` or `the override KEY=VALUE`.
    `names` are the parts of the key, outermost name first. Return None if every source either omits
    the key or sets it to null. `path` and `overrides` are as in `read_merged`."""
    for source, content in reversed(_sources(path, overrides)):
        if _value(content, names) is None:
            continue
        if not isinstance(source, Path):
            return f"the override {source}"
        node: Any = yaml.compose(source.read_text(encoding="utf-8"), yaml.SafeLoader)
        with suppress(KeyError):
            for name in names:
                key, node = {key.value: (key, inner) for key, inner in node.value}[name]
            return f"{_shown(source)}, line {key.start_mark.line + 1}"
        return _shown(source)  # the key is merged by <<
    return None


def over(below: Content, above: Content, path: str = "") -> Content:
    """Merge `above` over `below`: mappings are merged, other values are replaced.

    A mapping in `above` with `replace: true` replaces its counterpart in `below`, and null removes
    a named section. `path` is the dotted key of both mappings. Raises InvalidConfigError if
    `replace` is set to anything but true, or if an empty mapping would change nothing.
    """
    replace = above.get(REPLACE, False)
    if REPLACE in above and replace is not True:
        raise InvalidConfigError([f"{join(path, REPLACE)} must be true, got {replace!r:.80}"])
    merged = {} if replace else dict(below)
    for key, value in above.items():
        name = join(path, str(key))
        if isinstance(value, Mapping):
            old = merged.get(key)
            if old and not value and isinstance(old, Mapping):
                raise InvalidConfigError(
                    [
                        f"{name}={{}} changes nothing, because sections are merged; to reset "
                        f"{name}, set {name}={{replace: true}}"
                    ]
                )
            value = over(old if isinstance(old, Mapping) else {}, value, name)
        if value is None and path in NAMED_SECTIONS and key in merged:
            del merged[key]
        elif key != REPLACE:
            merged[key] = {} if value is None and name in NAMED_SECTIONS else value
    return merged


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and value of every leaf in nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_saved(path: Path) -> Content:
    """Read a saved config into a plain mapping, without resolving references.

    Raises InvalidConfigError if the file cannot be read.
    """
    return cast(Content, _with_strings(_load(path), unescaped))


def to_text(content: Content) -> str:
    """Dump plain values as YAML that `read_merged` and `read_saved` both read back unchanged."""
    return as_yaml(escaped(content))


def as_yaml(content: Content) -> str:
    """Dump plain values as YAML in which `read_merged` resolves references."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def escaped(value: Any) -> Any:
    """Escape every `${` in nested plain values, so that it is not read as a reference."""
    return _with_strings(value, lambda text: re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def unescaped(text: str) -> str:
    """Undo `escaped` for a single string."""
    return re.sub(r"(?<!\\)(\\*)\\\$\{", lambda match: match[1][::2] + "${", text)


def _with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every string in nested plain values, except keys."""
    if isinstance(value, Mapping):
        return {key: _with_strings(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_strings(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


def _foreign_references(content: Content) -> Iterator[str]:
    """Yield a message for each forbidden reference. References to keys are always allowed.
    References to environment variables are allowed only in keys that hold paths."""
    for key, value in flat(content):
        is_path = any(fnmatchcase(key, pattern) for pattern in ENVIRONMENT_KEYS)
        for match in _RESOLVER.finditer(str(value)):
            if match[1].strip() != "oc.env:" or not is_path:
                rule = "only ${oc.env:NAME} is supported, and only in keys that hold paths"
                yield f"{key} must not use {match[0]!r}: {rule}"


def _override(text: str) -> Content:
    """Parse `dotted.key=value`, where the value is YAML, into a nested mapping."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")) or key.startswith("-"):
        raise InvalidConfigError([f"an override must be key=value, got {text!r:.80}"])
    with _readable(f"override {text!r:.80} is not valid YAML"):
        ends = yaml.StreamEndToken, yaml.BlockEndToken
        *_, last = (each for each in yaml.scan(value) if not isinstance(each, ends))
        if value[last.end_mark.index :].strip():
            raise yaml.YAMLError("text after # is a comment; quote strings containing #")
        _checked(value)
        return cast(Content, OmegaConf.to_container(OmegaConf.from_dotlist([text])))


def _files(path: Path, chain: tuple[Path, ...] = ()) -> Iterator[tuple[Path, Content]]:
    """Yield (file, mapping) for a file's bases and then the file itself, in ascending priority.
    `chain` is the chain of `base` files that led to `path`."""
    path = real_path(path)
    if path in chain:
        loop = " -> ".join(_shown(p) for p in (*chain[chain.index(path) :], path))
        raise InvalidConfigError([f"base files form a cycle: {loop}"])
    content = dict(_load(path, f", the base of {_shown(chain[-1])}" if chain else ""))
    base = content.pop("base", None)
    names = base if isinstance(base, list) else [] if base is None else [base]
    if not all(isinstance(name, str) for name in names):
        problem = f"base in {_shown(path)} must be a path or a list of paths, got {base}"
        raise InvalidConfigError([problem])
    for name in names:
        yield from _files(path.parent / name, (*chain, path))
    yield path, content


def _load(path: Path, origin: str = "") -> Content:
    """Read one file into a plain mapping, without resolving references. `origin` is appended to the
    file name in errors."""
    name = _shown(path)
    with _readable(f"{name} is not valid YAML"):
        try:
            size = path.stat().st_size
            if not path.is_file():
                raise InvalidConfigError([f"config {name}{origin} must be a regular file"])
            if size > LARGEST:
                rule = f"must have at most {LARGEST} bytes, got {size}"
                raise InvalidConfigError([f"config {name}{origin} {rule}"])
            text = read_regular(path).decode()
        except OSError as error:
            problem = f"cannot read config {name}{origin}: {error.strerror or error}"
            problem += near_name(Path(name))
            raise InvalidConfigError([problem]) from error
        content = _parsed(text)
        if content is None:
            raise InvalidConfigError([f"{name} must contain a mapping of sections"])
        return deepcopy(content)


@lru_cache(maxsize=64)
def _parsed(text: str) -> Content | None:
    """Parse YAML text into a mapping, or return None if it is not a mapping.

    The result is cached because many configs share their bases.
    """
    if not isinstance(_checked(text), yaml.MappingNode | None):
        return None
    return cast(Content, OmegaConf.to_container(OmegaConf.create(text)))


def _checked(text: str) -> yaml.Node | None:
    """Return the root node of YAML text. Raises YAMLError for more than `MOST_VALUES` values, for a
    value that does not match its tag, for 010, 1:30 and 1_0, which YAML 1.1 reads as 8, 90 and 10,
    and for keys such as no and 1e3, which OmegaConf reads as false and 1000.0."""
    root = yaml.compose(text, _SafeLoader)
    nodes: list[Any] = [] if root is None else [root]
    for node in nodes:  # grows during the loop, and without end if an alias contains itself
        if len(nodes) > MOST_VALUES:
            raise yaml.YAMLError(f"aliases must not expand to more than {MOST_VALUES} values")
        scalar, kind = node.tag.endswith(_SCALARS), node.tag.rpartition(":")[2]
        if isinstance(node, yaml.MappingNode):
            if scalar:  # yaml would use the value of the key "=" in the mapping
                raise yaml.YAMLError(f"a mapping must not have the tag !!{kind}")
            merges = [key for key, _ in node.value if key.value == "<<"]
            if len(merges) > 1:  # other duplicates are rejected by OmegaConf
                raise yaml.YAMLError(
                    "a mapping must have at most one <<; to merge several mappings, set << to a "
                    "list"
                )
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                number = key.tag.endswith((":bool", ":float")) or _NUMBER.fullmatch(key.value)
                if number and not key.style:
                    raise yaml.YAMLError(f"a key must be a string (quote it), got {key.value}")
            nodes += chain.from_iterable(node.value)
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif not node.style and _OLD_NUMBER.fullmatch(node.value):
            raise yaml.YAMLError(
                f"a number must be decimal, got {node.value} (if it is a string, quote it)"
            )
        elif not node.style and _TOO_SMALL.fullmatch(node.value) and not float(node.value):
            raise yaml.YAMLError(
                f"a number must be 0 or at least 1e-323 in magnitude, got {node.value}"
            )
        elif scalar:
            loader: Any = yaml.SafeLoader("")
            if loader.resolve(yaml.ScalarNode, node.value, (True, False)) == node.tag:
                continue  # has no explicit tag: 2024-31-12, for example, is a string
            try:
                loader.construct_object(node)
            except (AttributeError, LookupError) as error:  # e.g. for !!bool foo
                rule = f"a value must match its tag, got !!{kind} {node.value!r:.80}"
                raise yaml.YAMLError(rule) from error
    return root


def _shown(path: Path) -> str:
    """Return `path` as text, relative to the working directory if the path is inside this
    directory."""
    path = real_path(path)
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
