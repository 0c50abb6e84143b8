"""Bind plain mappings to nested dataclasses with pydantic, reporting one line per problem.

Values are not coerced: a string is not a number, a number is not a string, and a bool is not an
integer. The only exception is that integers are accepted as floats. A field's type may be bool,
int, float, str, None, Literal, a union, list, tuple, dict[str, T] or a section.
"""

import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from models.section import Check, Section, closest, join, problems, shown
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
    "less_than": "below {lt}",
    "multiple_of": "a multiple of {multiple_of}",
    "too_short": "nonempty",
}
"""Maps the type of each pydantic error about a bound to a phrase that describes the bound."""


OTHER_NAMES: Final = {"sso": "spectral_sphere", "muon++": "muon_plus_plus"}
"""Maps common names of rules to the names used by Spectrain, if the two names are too different for
`closest`."""

NAMED_SECTIONS: Final = (
    "data.train", "data.validation", "optimizer.roles", "pc.overrides", "tasks.files",
)  # fmt: skip
"""Keys that map names to sections; `NAME: null` removes a section inherited from a base file."""


class InvalidConfigError(ConfigError):
    """Raised for an invalid config; `problems` contains one line for each problem."""

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
    """Bind `mapping` to a section of type `kind`.

    If `check` is false, only keys, types and bounds are checked; cross-field checks and the checks
    in `between` are skipped. Raises InvalidConfigError with all problems.
    """
    text = json.dumps(mapping, default=str)
    lines: list[str] = []
    try:
        bound: T = _adapter(kind).validate_json(text)
        sections = _sections(bound)
    except ValidationError as error:
        lines += dict.fromkeys(_lines(kind, error))
        bound = object.__new__(kind)  # its attributes are filled in below
        sections = _bindable(kind, json.loads(text))
    for loc, section in sections if check else ():
        lines += problems(section, section.checks(), key_at(kind, loc)[0])
        if lines and len(loc) == 1:
            vars(bound)[str(loc[0])] = section
    for checks in between if check else ():
        # After an error, these checks may raise because sections are missing.
        with suppress(Exception) if lines else nullcontext():
            lines += problems(bound, checks(bound))
    if lines:
        raise InvalidConfigError(lines)
    return bound


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def _sections(value: Any, loc: Loc = ()) -> Iterator[tuple[Loc, Section]]:
    """Yield the path and value of every section in a value that has been bound."""
    if isinstance(value, Section):
        yield loc, value
        value = vars(value)
    if isinstance(value, Mapping | list | tuple):
        for name, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _sections(part, (*loc, name))


def _bindable(kind: Any, content: Any, loc: Loc = ()) -> Iterator[tuple[Loc, Section]]:
    """Yield the path and value of every valid section, even if others are invalid."""
    if kind is None or not isinstance(content, Mapping | list):
        return
    with suppress(ValidationError):
        section = _adapter(kind).validate_json(json.dumps(content))
        if isinstance(section, Section):
            yield loc, section
    for name, part in content.items() if isinstance(content, Mapping) else enumerate(content):
        yield from _bindable(member(kind, name), part, (*loc, name))


def _lines(root: type, error: ValidationError) -> Iterator[str]:
    """Yield one line for each problem in `error`. A list that is too short counts as one
    problem."""
    for problem in error.errors(include_url=False):
        loc, name, value = problem["loc"], problem["type"], problem["input"]
        if name == "unexpected_keyword_argument":
            path, kind = key_at(root, loc[:-1])
            key, siblings = str(loc[-1]), list(types_of(kind))
            near = closest(key, siblings)
            elsewhere = [p for p, _ in schema_paths(root) if p.split(".")[-1] == key]
            if near or elsewhere:
                hint = f"did you mean {join(path, near) if near else elsewhere[0]}?"
            else:
                hint = f"{path or 'the config'} has the keys {', '.join(siblings)}"
            full = join(path, key)
            package = _of_package(full, key) if path == RULE_SECTION else ""
            yield f"unknown key {full}; {hint}{package}"
            continue
        if name == "missing" and isinstance(loc[-1], int):
            loc, name = loc[:-1], "tuple_type"  # the list is too short
        path, kind = key_at(root, loc)
        if name == "missing":
            yield from _missing(kind, path)
        elif name == "value_error":
            yield from (join(path, line) for line in str(problem["ctx"]["error"]).splitlines())
        elif name in BOUNDS:
            bounds = {k: f"{v:g}" if isinstance(v, float) else v for k, v in problem["ctx"].items()}
            yield f"{path} must be {BOUNDS[name].format(**bounds)}, got {shown(value)}"
        elif value is None and path.rpartition(".")[0] in NAMED_SECTIONS:
            yield f"{path}=null removes an entry of a base file, but no base file defines {path}"
        else:
            line = f"{path or 'the config'} must be {allowed_values(kind)}, got {shown(value)}"
            words = [word for word in get_args(without_null(kind)) if isinstance(word, str | int)]
            near = closest(OTHER_NAMES.get(str(value).lower(), str(value)), map(str, words))
            yield line + (f"; did you mean {near}?" if near else "") + _of_package(path, value)


RULE_SECTION: Final = "optimizer.rules"
"""Section that contains one section per rule."""


def _of_package(path: str, rule: object) -> str:
    """For an unknown rule or the section of an unknown rule, return a hint that packages can
    provide rules. The hint is appended to the error. For other keys, return ""."""
    names_rule = path.startswith("optimizer.") and path.endswith(".rule")
    if not names_rule and not path.startswith(f"{RULE_SECTION}."):
        return ""
    from spectral.rules import RULES  # slow, because it imports torch

    reason = RULES.left_out.get(str(rule))
    return f"; {reason or 'to use your own rule, install its package'}"


def _missing(kind: Any, path: str) -> Iterator[str]:
    """Yield a line for a missing key, or for each required key in a missing section."""
    required = [
        f.name
        for f in (fields(kind) if is_dataclass(kind) else ())
        if f.default is MISSING and f.default_factory is MISSING
    ]
    for name in required:
        yield from _missing(types_of(kind)[name], join(path, name))
    if not required:
        yield f"{path} is required ({allowed_values(kind)})"


def key_at(root: type, loc: Loc) -> tuple[str, Any]:
    """Return the dotted path and the annotation of the value at `loc`, a location reported by
    pydantic."""
    path, kind = "", cast(Any, root)
    for part in loc:
        kind = member(kind, part)
        path = f"{path}[{part}]" if isinstance(part, int) else join(path, part)
    return path, kind


def member(kind: Any, key: int | str) -> Any:
    """Return the annotation of the member `key` of `kind`, or None if there is no such member.
    `key` is a name or an index."""
    section = without_null(kind)
    index, origins = (0, (list, tuple)) if isinstance(key, int) else (1, (dict,))
    if get_origin(section) in origins:
        return get_args(section)[index]
    return types_of(section).get(str(key))


def allowed_values(kind: Any) -> str:
    """Describe in words the values allowed by the annotation `kind`."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(allowed_values(option) for option in args)
    if origin is Literal:
        return f"one of {', '.join(x if isinstance(x, str) else shown(x) for x in args)}"
    if origin is list or args[1:] == (...,):
        return f"a list (each item {allowed_values(args[0])})"
    if origin is tuple:
        return f"a list of {len(args)} ({', '.join(allowed_values(option) for option in args)})"
    return SCALARS[dict if is_dataclass(kind) or origin is dict else kind]


def schema_paths(kind: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and annotation of each leaf of a section. In a path, NAME stands for
    any key of a mapping."""
    for name, inner in types_of(kind).items():
        inner, suffix = one_section(inner)
        full = join(path, name) + suffix
        if types_of(inner):
            yield from schema_paths(inner, full)
        else:
            yield full, inner


def one_section(kind: Any) -> tuple[Any, str]:
    """If `kind` is a dict of sections, return the annotation of one section and the path suffix
    `.NAME`. For a list of sections, the suffix is `[N]`. For any other annotation, return the
    annotation itself and an empty suffix.
    """
    args = get_args(kind)
    if get_origin(kind) is dict:
        return args[1], ".NAME"
    return (args[0], "[N]") if args[1:] == (...,) and is_dataclass(args[0]) else (kind, "")


def types_of(kind: Any) -> dict[str, Any]:
    """Map each field of the section `kind` to its annotation. `kind` may be nullable. Return {} if
    `kind` is not a section."""
    section = without_null(kind)
    if not is_dataclass(section):
        return {}
    hints = _hints(section)
    return {field.name: hints[field.name] for field in fields(section)}


def without_null(kind: Any) -> Any:
    """Return X if the annotation `kind` is `X | None`, else `kind`."""
    options = [option for option in get_args(kind) if option is not types.NoneType]
    union = get_origin(kind) in (Union, types.UnionType)
    return options[0] if union and len(options) == 1 else kind
