"""Values of config keys: another one of the same type for every key of a run config."""

import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from spectral.schedules import SCHEDULES
from training.config.binding import required
from training.config.schema import Config

Keys = tuple[str, ...]


def leaves(content: dict[str, Any], path: Keys = ()) -> Iterator[Keys]:
    """Yield the path of every key of nested mappings that is not a section."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def get(content: dict[str, Any], path: Keys) -> Any:
    """Return the value at `path`."""
    for key in path:
        content = content[key]
    return content


def replaced(content: dict[str, Any], path: Keys, value: Any) -> dict[str, Any]:
    """Return `content` with another value at `path`."""
    first, *rest = path
    inner = replaced(content.get(first) or {}, tuple(rest), value) if rest else value
    return {**content, first: inner}


def type_of(path: Keys, kind: Any = Config) -> Any:
    """Return the annotation of the field at `path`."""
    for key in path:
        kind = _section(kind)
        kind = get_args(kind)[1] if get_origin(kind) is dict else get_type_hints(kind)[key]
    return kind


def another(kind: Any, value: Any) -> Any:
    """Return a value that the annotation `kind` allows, other than `value`."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        kinds = [each for each in args if each is not types.NoneType]
        return None if value is not None and is_dataclass(kinds[0]) else another(kinds[0], value)
    if origin is Literal:
        return next(each for each in args if each != value)
    if origin in (list, tuple):
        return [*(value or ()), another(args[0], None)]
    if origin is dict:
        return {"name": another(args[1], None)}
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return {f.name: another(hints[f.name], None) for f in fields(kind) if required(f)}
    if kind is bool:
        return not value
    if value in SCHEDULES:
        return next(name for name in SCHEDULES if name != value)
    if kind is str:
        return f"{value}_"
    if kind is int:
        return (value or 0) + 1
    return value / 2 if value else 0.25


def _section(kind: Any) -> Any:
    """The section in an annotation that may be null."""
    options = [each for each in get_args(kind) if each is not types.NoneType]
    union = get_origin(kind) in (Union, types.UnionType)
    return options[0] if union else kind
