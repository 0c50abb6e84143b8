"""Binding plain mappings to nested dataclasses by pydantic, with every problem as one line.

Nothing is converted silently: a string is not a number, a number not a string, a bool not an
integer; only an integer where a float is expected becomes a float. Fields may be bool, int, float,
str, None, Literal, unions, list, tuple, dict[str, T] and sections of these.
"""

import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from models.section import Check, Section, closest, join, problems, shown
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
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "too_short": "a list of at least {min_length}",
}
"""By kind of pydantic's error, the words for its bound."""


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


def bind(
    kind: type[T],
    mapping: object,
    between: Sequence[Callable[[T], Iterator[Check]]] = (),
    *,
    check: bool = True,
) -> T:
    """Return the section `kind` that `mapping` describes.

    Without `check`, only keys, types and bounds count, not what must hold between fields, nor
    `between` its sections. Raises InvalidConfigError with all problems.
    """
    adapter, text = _adapter(kind), json.dumps(mapping, default=str)
    lines: list[str] = []
    try:
        bound: T = adapter.validate_json(text)
        sound: dict[Loc, Any] = {(): bound}
    except ValidationError as error:
        lines += _lines(kind, error)
        sound = dict(_sound(kind, json.loads(text)))
        bound = object.__new__(kind)
        vars(bound).update({str(loc[0]): part for loc, part in sound.items() if len(loc) == 1})
    if check:
        for loc, part in sound.items():
            lines += walk_problems(part, ".".join(map(str, loc)))
        for checks in between:
            # What is wrong by itself may be missing, or make no sense to others.
            with suppress(Exception) if lines else nullcontext():
                lines += problems(bound, checks(bound))
    if lines:
        raise InvalidConfigError(lines)
    return bound


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def _sound(kind: Any, content: Any, loc: Loc = ()) -> Iterator[tuple[Loc, Any]]:
    """Yield place and value of each section that can be bound, without the sections in it."""
    try:
        yield loc, _adapter(kind).validate_json(json.dumps(content))
    except ValidationError:
        for name, inner in types_of(kind).items() if isinstance(content, Mapping) else ():
            absent: Any = None if required(kind.__dataclass_fields__[name]) else {}
            part = content.get(name, absent if is_dataclass(inner) else None)
            if types_of(inner) and part is not None:
                yield from _sound(without_null(inner), part, (*loc, name))


def _lines(root: type, error: ValidationError) -> Iterator[str]:
    """Yield a line for each problem that pydantic has found; of the members of a union, one."""
    seen: set[str] = set()
    for found in error.errors(include_url=False):
        loc, name, value = found["loc"], found["type"], found["input"]
        if name == "missing" and loc and isinstance(loc[-1], int):
            loc, name = loc[:-1], "tuple_type"  # it has too few items
        path, kind = place(root, loc)
        if path in seen and name not in ("value_error", "unexpected_keyword_argument"):
            continue
        seen.add(path)
        if name == "unexpected_keyword_argument":
            yield _unknown(root, loc)
        elif name == "missing":
            yield from _missing(kind, path)
        elif name == "value_error":
            yield from (join(path, line) for line in str(found["ctx"]["error"]).splitlines())
        elif name in BOUNDS:
            bounds = {k: f"{v:g}" if isinstance(v, float) else v for k, v in found["ctx"].items()}
            yield f"{path} must be {BOUNDS[name].format(**bounds)}, got {shown(value)}"
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
    inner = {f.name for f in fields(kind) if required(f)} if is_dataclass(kind) else ()
    for name, part in types_of(kind).items():
        if name in inner:
            yield from _missing(part, join(path, name))
    if not inner:
        yield f"{path} is required ({described(kind)})"


def _unknown(root: type, loc: Loc) -> str:
    """Return the line about an unknown key: what to do about a removed one, else the key that is
    most like it."""
    path, kind = place(root, loc[:-1])
    key, siblings = str(loc[-1]), list(types_of(kind))
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
        inner, types = get_args(without_null(kind)), types_of(kind)
        if isinstance(part, int):
            kind = inner[0]  # of a list, whose items are alike
            path += f"[{part}]"
        elif part in types or get_origin(without_null(kind)) is dict:
            kind = types.get(part) or inner[1]
            path = join(path, part)
        else:
            break  # a member of a union
    return path, kind


def walk_problems(section: object, path: str = "") -> Iterator[str]:
    """Yield the problems of a section, and of every section inside it, with dotted paths."""
    inner: Mapping[str, object] = section if isinstance(section, Mapping) else {}
    if isinstance(section, Section):
        inner = vars(section)
        yield from problems(section, section.checks(), path)
    for key, value in inner.items():
        yield from walk_problems(value, join(path, key))


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


def schema_paths(kind: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted path, NAME for a dict's key, and annotation of each leaf of a section."""
    for name, inner in types_of(kind).items():
        place = join(path, name)
        if get_origin(inner) is dict:
            inner, place = get_args(inner)[1], f"{place}.NAME"
        if types_of(inner):
            yield from schema_paths(inner, place)
        else:
            yield place, inner


def types_of(kind: Any) -> dict[str, Any]:
    """Return the annotations of the fields of a section, or of one that may be null, by name; none
    for any other annotation."""
    section = without_null(kind)
    if not is_dataclass(section):
        return {}
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in fields(section)}


def without_null(kind: Any) -> Any:
    """Return X if the annotation `kind` is `X | None`, else `kind`."""
    options = [option for option in get_args(kind) if option is not types.NoneType]
    union = get_origin(kind) in (Union, types.UnionType)
    return options[0] if union and len(options) == 1 else kind


def required(field: Field[Any]) -> bool:
    """Return whether `field` has no default."""
    return field.default is MISSING and field.default_factory is MISSING
