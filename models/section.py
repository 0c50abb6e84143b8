"""Base class for run config sections: frozen dataclasses with a description below each field.

pydantic strictly validates field types and bounds (`Annotated`, `Field`). docs/configuration.md is
generated from the field descriptions (training/config/manual.py). A section's `checks` validate its
fields against each other; training/config/checks.py validates across sections.
"""

import difflib
import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import Field as DataclassField
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Final, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

LARGEST_INTEGER: Final = 1 << 53
LARGEST_FLOAT: Final = 1e100
"""Default bound for numbers without a declared bound: far above useful values, but too small to
overflow in arithmetic."""

Number = Annotated[float, Field(ge=-LARGEST_FLOAT, le=LARGEST_FLOAT)]
Positive = Annotated[float, Field(gt=0, le=LARGEST_FLOAT)]
AtLeast0 = Annotated[float, Field(ge=0, le=LARGEST_FLOAT)]
Count = Annotated[int, Field(ge=1, le=LARGEST_INTEGER)]
Whole = Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]


def _exact(value: object) -> object:
    """Reject other types that compare equal to an integer, such as true, which equals 1."""
    if type(value) is not int:
        raise PydanticCustomError("int_type", "an integer")
    return value


ExactInt = BeforeValidator(_exact)

Check = tuple[str, object, str]
"""A section key, whether the key's value violates a rule, and the rule, e.g. `must be at most
3`."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Section:
    """Base class that makes every section a frozen dataclass with keyword-only arguments."""

    __dataclass_fields__: ClassVar[dict[str, DataclassField[Any]]]
    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def checks(self) -> Iterator[Check]:
        """Yield the checks that involve several fields."""
        yield from ()


def problems(section: object, checks: Iterable[Check], path: str = "") -> Iterator[str]:
    """Yield `KEY RULE, got VALUE` for each invalid key of a section, or `KEY = VALUE requires ...`
    if the rule starts with `requires`. If the rule already contains `, got VALUE`, no value is
    added. If the rule contains a colon and a reason, the value is inserted before the colon. `path`
    is the section's path in the config."""
    for key, wrong, rule in checks:
        if wrong:
            name = join(path, key)
            value = "" if ", got " in rule else shown(attrgetter(key)(section))
            if value and rule.startswith("requires"):
                yield f"{name} = {value} {rule}"
                continue
            head, colon, reason = rule.partition(": ")
            yield f"{name} {head}{value and f', got {value}'}{colon}{reason}"


def ignored(section: Any, *keys: str, when: str) -> Iterator[Check]:
    """Check that keys with no effect are left at their defaults. `when` states the condition, such
    as "with kind preset"."""
    for key in keys:
        default = getattr(type(section), key)
        rule = f"has no effect {when} and must keep its default {shown(default)}"
        yield key, getattr(section, key) != default, rule


def join(path: str, name: str) -> str:
    """Return `path.name`, or `name` at the root."""
    return f"{path}.{name}" if path else name


def shown(value: object) -> str:
    """Return `value` as YAML with quoted strings, truncated to 80 characters."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return textwrap.shorten(repr(list(value) if isinstance(value, tuple) else value), 80)


def one_of(word: str, options: Iterable[str]) -> str:
    """Return `one of OPTIONS, got WORD`, with a suggestion if an option is close to `word`."""
    options = list(options)
    near = closest(word, options)
    hint = f"; did you mean {near}?" if near else ""
    return f"one of {', '.join(options)}, got {word!r}{hint}"


def closest(word: str, options: Iterable[str]) -> str | None:
    """Return the option closest to `word`, ignoring case, or None if none is close."""
    in_lower_case = {option.lower(): option for option in options}
    near = difflib.get_close_matches(word.lower(), in_lower_case, n=1)
    return in_lower_case[near[0]] if near else None
