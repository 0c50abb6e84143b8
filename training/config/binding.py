"""Strict binding of plain mappings to nested dataclasses, with every problem reported at once.

Nothing is converted silently: a string is no number, a number no string and a bool no integer; only
an integer where a float is expected becomes a float. Fields may be bool, int, float, str, None,
Literal, unions, list, tuple, dict[str, T] and dataclasses of these.
"""

import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from models.section import Section, closest, shown
from training.config.removed import removal
from training.errors import ConfigError

T = TypeVar("T")

# Yields the problems of one section, each a sentence that begins with the name of a field.
Check = Callable[[Any], Iterable[str]]

_SCALARS: Final[Mapping[type, str]] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    types.NoneType: "null",
}


class InvalidConfigError(ConfigError):
    """A config with one or several `problems`, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class Invalid:
    """Placeholder of a value that could not be bound, for a reason among the binder's problems."""


_INVALID: Final = Invalid()


class Binder:
    """Binds mappings to dataclasses and collects what is wrong in `problems`, a line each.

    root    outermost dataclass, in whose schema misplaced keys are looked up
    checks  by section class, what to check beside the section's own `problems`; None checks only
            keys and types
    """

    def __init__(self, root: type, checks: Mapping[type, Check] | None = None) -> None:
        self.problems: list[str] = []
        self._checks = checks
        self._paths = [path for path, _ in schema_paths(root)]

    def bind(self, kind: type[T], mapping: object) -> T | None:
        """Return the `kind` that `mapping` describes, or None if `problems` grew."""
        before = len(self.problems)
        bound = self._section(kind, mapping, "")
        return bound if len(self.problems) == before else None

    def _section(self, kind: type[T], mapping: object, path: str) -> T | None:
        """Return the `kind` that `mapping` describes at `path`, or None if a field cannot be bound.

        A section whose values are wrong is returned all the same, so that the sections around it
        can be checked too.
        """
        if not isinstance(mapping, Mapping):
            self.problems.append(f"{path or 'the config'} must be a section, got {shown(mapping)}")
            return None
        hints = get_type_hints(kind)
        known = {f.name: f for f in fields(cast(Any, kind)) if f.init}
        for key in mapping:
            if key not in known:
                self.problems.append(self._unknown(str(key), path, list(known)))
        values: dict[str, object] = {}
        for name, field in known.items():
            place = join(path, name)
            if name in mapping:
                values[name] = self._value(hints[name], mapping[name], place)
            elif required(field):
                values[name] = self._missing(hints[name], place)
        if any(value is _INVALID for value in values.values()):
            return None
        return self._construct(kind, values, path)

    def _construct(self, kind: type[T], values: Mapping[str, object], path: str) -> T | None:
        """Return `kind(**values)`, noting its ValueError or its problems."""
        try:
            bound = kind(**values)
        except ValueError as error:
            self.problems.append(placed(path, str(error), kind))
            return None
        if self._checks is not None:
            self.problems.extend(placed(path, line, kind) for line in found_in(bound, self._checks))
        return bound

    def _value(self, kind: Any, value: object, path: str) -> object:
        """Return `value` as the annotation `kind`, or _INVALID after noting a problem."""
        origin = get_origin(kind)
        if is_dataclass(kind):
            bound = self._section(cast(type[object], kind), value, path)
            return _INVALID if bound is None else bound
        if origin in (Union, types.UnionType):
            return self._union(kind, value, path)
        if origin is Literal:
            return self._literal(kind, value, path)
        if origin in (list, tuple):
            return self._sequence(kind, value, path)
        if origin is dict:
            return self._dict(get_args(kind)[1], value, path)
        return self._scalar([kind], kind, value, path)

    def _scalar(self, kinds: Iterable[type], kind: Any, value: object, path: str) -> object:
        """Return `value` if its type is among `kinds`, the scalars that the field `kind` allows."""
        kinds = list(kinds)
        for scalar in kinds:
            if scalar not in _SCALARS:
                raise TypeError(f"{path} has the type {kind}, which a config cannot hold")
        if isinstance(value, float) and not math.isfinite(value):
            return self._mismatch(kind, value, path)
        if type(value) in kinds:
            return value
        if type(value) is int and float in kinds:
            return float(value)
        return self._mismatch(kind, value, path)

    def _union(self, kind: Any, value: object, path: str) -> object:
        """Return `value` as one of several scalars, or as the one option beside null."""
        options = [option for option in get_args(kind) if option is not types.NoneType]
        if len(options) > 1 or options[0] in _SCALARS:
            return self._scalar(get_args(kind), kind, value, path)
        return None if value is None else self._value(options[0], value, path)

    def _literal(self, kind: Any, value: object, path: str) -> object:
        options = get_args(kind)
        if any(value == option and type(value) is type(option) for option in options):
            return value
        close = closest(str(value), [str(option) for option in options])
        hint = f"; did you mean {close}?" if close else ""
        line = f"{path} must be {described(kind)}, got {shown(value)}{hint}"
        self.problems.append(removal(f"{path}={value}") or line)
        return _INVALID

    def _sequence(self, kind: Any, value: object, path: str) -> object:
        if not isinstance(value, list | tuple):
            return self._mismatch(kind, value, path)
        args = get_args(kind)
        open_ended = get_origin(kind) is list or args[1:] == (...,)
        kinds = [args[0]] * len(value) if open_ended else list(args)
        if len(kinds) != len(value):
            return self._mismatch(kind, value, path)
        pairs = enumerate(zip(kinds, value, strict=True))
        items = [self._value(item_kind, item, f"{path}[{i}]") for i, (item_kind, item) in pairs]
        if any(item is _INVALID for item in items):
            return _INVALID
        return items if get_origin(kind) is list else tuple(items)

    def _dict(self, kind: Any, value: object, path: str) -> object:
        if value is None:  # as YAML has a key with nothing below it
            return {}
        if not isinstance(value, Mapping):
            return self._mismatch(dict, value, path)
        result: dict[str, object] = {}
        for key, item in value.items():
            if isinstance(key, str) and item is None and is_dataclass(kind):
                continue  # leaves out what a base has
            if isinstance(key, str):
                result[key] = self._value(kind, item, join(path, key))
            else:
                self.problems.append(f"{path} must have names as keys, got {shown(key)}")
                return _INVALID
        return _INVALID if any(item is _INVALID for item in result.values()) else result

    def _mismatch(self, kind: Any, value: object, path: str) -> object:
        self.problems.append(f"{path} must be {described(kind)}, got {shown(value)}")
        return _INVALID

    def _missing(self, kind: Any, path: str) -> object:
        """Return _INVALID after noting a required key, or each required key of a section."""
        before = len(self.problems)
        if is_dataclass(kind):
            self._section(cast(type[object], kind), {}, path)
        if len(self.problems) == before:
            self.problems.append(f"{path} is required ({described(kind)})")
        return _INVALID

    def _unknown(self, key: str, path: str, siblings: list[str]) -> str:
        """Return the line about an unknown key: what to do about a removed one, else the key that
        is most like it."""
        full = join(path, key)
        if line := removal(full):
            return line
        close = closest(key, siblings)
        elsewhere = [p for p in self._paths if p.split(".")[-1] == key]
        if close:
            return f"unknown key {full}; did you mean {join(path, close)}?"
        if elsewhere:
            return f"unknown key {full}; did you mean {elsewhere[0]}?"
        return f"unknown key {full}; {path or 'the config'} has the keys {', '.join(siblings)}"


def found_in(instance: object, checks: Mapping[type, Check]) -> Iterator[str]:
    """Yield a section's own problems, then those that the check of its class finds."""
    if isinstance(instance, Section):
        yield from instance.problems()
    check = checks.get(type(instance))
    if check is not None:
        yield from check(instance)


def walk_problems(instance: object, checks: Mapping[type, Check], path: str = "") -> Iterator[str]:
    """Yield the problems of `instance` and of every section inside it, with dotted paths."""
    if isinstance(instance, Mapping):
        for key, value in instance.items():
            yield from walk_problems(value, checks, join(path, str(key)))
    elif is_dataclass(instance) and not isinstance(instance, type):
        for line in found_in(instance, checks):
            yield placed(path, line, type(instance))
        for field in fields(instance):
            yield from walk_problems(getattr(instance, field.name), checks, join(path, field.name))


def placed(path: str, sentence: str, kind: type) -> str:
    """Return `sentence` with the dotted path of the key that it is about."""
    first = sentence.split(" ", 1)[0].split(".")[0]
    if first in {field.name for field in fields(cast(Any, kind))}:
        return join(path, sentence)
    return f"{path}: {sentence}" if path else sentence


def join(path: str, name: str) -> str:
    """Return `path.name`, or `name` at the root."""
    return f"{path}.{name}" if path else name


def described(kind: Any) -> str:
    """Return a description of `kind` that follows "must be"."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(described(option) for option in args)
    if origin is Literal:
        names = [shown(option) if not isinstance(option, str) else option for option in args]
        return f"one of {', '.join(names)}"
    if origin is list or (origin is tuple and args[1:] == (...,)):
        return f"a list, each item {described(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}: {', '.join(described(option) for option in args)}"
    if kind is dict or origin is dict or is_dataclass(kind):
        return "a section"
    return _SCALARS.get(kind, str(kind))


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
