"""Binding plain mappings to nested dataclasses by pydantic, with every problem as one line.

Nothing is converted silently: a string is not a number, a number not a string, a bool not an
integer; only an integer where a float is expected becomes a float. Fields may be bool, int, float,
str, None, Literal, unions, list, tuple, dict[str, T] and sections of these.
"""

import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from models.section import Section, closest, shown
from training.config.removed import removal
from training.errors import ConfigError

T = TypeVar("T")
Loc = tuple[int | str, ...]

SCALARS: Final[Mapping[Any, str]] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    types.NoneType: "null",
    dict: "a section",
}
BOUNDS: Final = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "below"),
}
"""By kind of pydantic's error, the name of its bound and the words for it."""


OTHER_NAMES: Final = {
    "sso": "spectral_sphere",
    "spectralsphere": "spectral_sphere",
    "muonsphere": "muon_sphere",
    "muon++": "muon_plus_plus",
    "adam": "adamw",
}
"""Rules by other names in use, in lower case."""

NAMED_SECTIONS: Final = ("data.train", "data.validation", "optimizer.roles", "pc.overrides")
"""Where sections have names of their own, of which null leaves one out."""


class InvalidConfigError(ConfigError):
    """A config with one or several `problems`, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def bind(kind: type[T], mapping: object, *, check: bool = True) -> T:
    """Return the section `kind` that `mapping` describes.

    Without `check`, only keys, types and bounds count, not what must hold between fields. Raises
    InvalidConfigError with all problems.
    """
    adapter, text = _adapter(kind), json.dumps(mapping, default=str)
    problems: list[str] = []
    try:
        bound: T = adapter.validate_json(text)
        problems += walk_problems(bound) if check else ()
    except ValidationError:
        try:  # again, for what sections that could be bound have to say of themselves
            adapter.validate_json(text, context=check)
        except ValidationError as error:
            problems += _lines(kind, error)
    if problems:
        raise InvalidConfigError(problems)
    return bound


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def _lines(root: type, error: ValidationError) -> Iterator[str]:
    """Yield a line for each problem that pydantic has found; of the members of a union, one."""
    seen: set[str] = set()
    for found in error.errors(include_url=False):
        loc, name, value = found["loc"], found["type"], found["input"]
        if name == "missing" and loc and isinstance(loc[-1], int):
            loc, name = loc[:-1], "too_short"  # an item of a tuple
        path, kind = place(root, loc)
        if path in seen and name not in ("value_error", "unexpected_keyword_argument"):
            continue
        seen.add(path)
        if name == "unexpected_keyword_argument":
            yield _unknown(root, loc)
        elif name == "missing":
            yield from _missing(kind, path)
        elif name == "value_error":
            for line in str(found["ctx"]["error"]).splitlines():
                yield placed(path, line, kind)
        elif name in BOUNDS:
            bound, words = BOUNDS[name]
            most = found["ctx"][bound]
            text = f"{most:g}" if isinstance(most, float) else most
            yield f"{path} must be {words} {text}, got {shown(value)}"
        else:
            yield _mismatch(kind, path, value)


def _mismatch(kind: Any, path: str, value: object) -> str:
    """Return the line about a value that is not what the annotation `kind` says."""
    if value is None and path.rpartition(".")[0] in NAMED_SECTIONS:
        return f"{path} is null, which leaves out what a base has under that name, but none has it"
    line = f"{path or 'the config'} must be {described(kind)}, got {shown(value)}"
    if get_origin(without_null(kind)) is Literal:
        options = [str(option) for option in get_args(without_null(kind))]
        close = OTHER_NAMES.get(str(value).lower()) or closest(str(value), options)
        line += f"; did you mean {close}?" if close else ""
    return removal(f"{path}={value}") or line


def _missing(kind: Any, path: str) -> Iterator[str]:
    """Yield a line for a required key, or for each required key of a section."""
    hints = get_type_hints(kind) if is_dataclass(kind) else {}
    inner = [f.name for f in fields(cast(Any, kind)) if required(f)] if hints else []
    for name in inner:
        yield from _missing(hints[name], join(path, name))
    if not inner:
        yield f"{path} is required ({described(kind)})"


def _unknown(root: type, loc: Loc) -> str:
    """Return the line about an unknown key: what to do about a removed one, else the key that is
    most like it."""
    path, kind = place(root, loc[:-1])
    key, siblings = str(loc[-1]), [f.name for f in fields(without_null(kind))]
    full = join(path, key)
    if line := removal(full):
        return line
    near = closest(key, siblings)
    elsewhere = [p for p, _ in schema_paths(root) if p.split(".")[-1] == key]
    if near or elsewhere:
        return f"unknown key {full}; did you mean {join(path, near) if near else elsewhere[0]}?"
    return f"unknown key {full}; {path or 'the config'} has the keys {', '.join(siblings)}"


def place(root: type, loc: Loc) -> tuple[str, Any]:
    """Return dotted path and annotation of what pydantic names by `loc`."""
    path, kind = "", cast(Any, root)
    for part in loc:
        inner = without_null(kind)
        args, hints = get_args(inner), get_type_hints(inner) if is_dataclass(inner) else {}
        if isinstance(part, int):
            kind = args[min(part, len(args) - 1)] if args[1:] != (...,) else args[0]
            path += f"[{part}]"
        elif part in hints or get_origin(inner) is dict:
            kind = hints[part] if hints else args[1]
            path = join(path, part)
        else:
            break  # a member of a union
    return path, kind


def walk_problems(section: object, path: str = "") -> Iterator[str]:
    """Yield the problems of a section, and of every section inside it, with dotted paths."""
    inner: Mapping[str, object] = section if isinstance(section, Mapping) else {}
    if isinstance(section, Section):
        inner = vars(section)
        for line in section.problems():
            yield placed(path, line, type(section))
    for key, value in inner.items():
        yield from walk_problems(value, join(path, key))


def placed(path: str, sentence: str, kind: Any) -> str:
    """Return `sentence` with the dotted path of the key that it is about."""
    first = sentence.split(" ", 1)[0].split(".")[0]
    if first in {field.name for field in fields(without_null(kind))}:
        return join(path, sentence)
    return f"{path}: {sentence}" if path else sentence


def join(path: str, name: str) -> str:
    """Return `path.name`, or `name` at the root."""
    return f"{path}.{name}" if path else name


def described(kind: Any) -> str:
    """Return what the annotation `kind` allows, in words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(described(option) for option in args)
    if origin is Literal:
        return f"one of {', '.join(x if isinstance(x, str) else shown(x) for x in args)}"
    if origin is list or args[1:] == (...,):
        return f"a list, each item {described(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}: {', '.join(described(option) for option in args)}"
    return SCALARS[dict if is_dataclass(kind) or origin is dict else kind]


def schema_paths(kind: type, path: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Yield dotted path, NAME for a dict's key, and field of each leaf of the dataclass `kind`."""
    hints = get_type_hints(kind)
    for field in fields(cast(Any, kind)):
        inner, place = hints[field.name], join(path, field.name)
        if get_origin(inner) is dict:
            inner, place = get_args(inner)[1], f"{place}.NAME"
        inner = without_null(inner)
        if is_dataclass(inner):
            yield from schema_paths(cast(type, inner), place)
        else:
            yield place, field


def without_null(kind: Any) -> Any:
    """Return X if the annotation `kind` is `X | None`, else `kind`."""
    options = [option for option in get_args(kind) if option is not types.NoneType]
    union = get_origin(kind) in (Union, types.UnionType)
    return options[0] if union and len(options) == 1 else kind


def required(field: Field[Any]) -> bool:
    """Return whether `field` has no default."""
    return field.default is MISSING and field.default_factory is MISSING
