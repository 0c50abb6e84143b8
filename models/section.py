"""A section of the run config: a frozen dataclass with a sentence under each of its fields.

pydantic reads the fields: types, which are strict, and bounds (`Annotated`, `Field`). The sentences
are the manual (training/config/manual.py). What must hold between the fields of a section is said
by its `problems`, what must hold between sections by training/config/checks.py.
"""

import difflib
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import Field as DataclassField
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Self, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

LARGEST_INTEGER: Final = 1 << 53
LARGEST_FLOAT: Final = 1e100
"""Bounds of numbers that have no other: far above any use, and still harmless to work with."""

Number = Annotated[float, Field(ge=-LARGEST_FLOAT, le=LARGEST_FLOAT)]
Positive = Annotated[float, Field(gt=0, le=LARGEST_FLOAT)]
AtLeast0 = Annotated[float, Field(ge=0, le=LARGEST_FLOAT)]
Count = Annotated[int, Field(ge=1, le=LARGEST_INTEGER)]
Whole = Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]


def _exact(value: object) -> object:
    """Refuse what only equals an integer, such as true, which pydantic takes for a literal 1."""
    if type(value) is not int:
        raise PydanticCustomError("int_type", "an integer")
    return value


ExactInt = BeforeValidator(_exact)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Section:
    """Base class of all sections, which makes each a frozen dataclass of keyword arguments."""

    __dataclass_fields__: ClassVar[dict[str, DataclassField[Any]]]
    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    @model_validator(mode="after")
    def checked(self, info: ValidationInfo) -> Self:
        """Check a section as soon as its fields are sound, unless the context is false."""
        if lines := list(self.problems()) if info.context else []:
            raise ValueError("\n".join(lines))
        return self

    def problems(self) -> Iterator[str]:
        """Yield what is wrong between the fields, each line beginning with the key that it is
        about."""
        yield from ()


def ignored(section: Any, *keys: str, when: str) -> Iterator[str]:
    """Yield a line for each of `keys` that is not at its default although it has no effect: the
    line says `when` that is so, as in "with kind preset"."""
    for key in keys:
        default, value = getattr(type(section), key), getattr(section, key)
        if value != default:
            yield (
                f"{key} must keep its default {shown(default)}, as it has no effect {when}, "
                f"got {shown(value)}"
            )


def shown(value: object) -> str:
    """Return `value` as YAML writes it, shortened; strings in quotes."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return textwrap.shorten(repr(list(value) if isinstance(value, tuple) else value), 80)


def named(word: str, options: Iterable[str]) -> str:
    """Return `one of ..., got word`, with the option that is most like it."""
    options = list(options)
    near = closest(word, options)
    hint = f"; did you mean {near}?" if near else ""
    return f"one of {', '.join(options)}, got {word!r}{hint}"


def closest(word: str, options: Iterable[str]) -> str | None:
    """Return the option most like `word`, or None if none is like it."""
    near = difflib.get_close_matches(word, list(options), n=1, cutoff=0.6)
    return near[0] if near else None
