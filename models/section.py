"""A section of the run config: a frozen dataclass with a sentence under each of its fields.

The sentences are the manual of the config (training/config/manual.py). What must hold of a section
by itself is said by its `problems`; what must hold between sections, by training/config/checks.py.
"""

import difflib
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from typing import Any


class Section:
    """Base class of all sections."""

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the section by itself, each line beginning with the key that it
        is about."""
        yield from ()


def at_least(section: Any, least: float, *keys: str) -> Iterator[str]:
    """Yield a line for each of `keys` that is set to less than `least`."""
    for key in keys:
        value = getattr(section, key)
        if value is not None and value < least:
            yield f"{key} must be at least {least}, got {value}"


def positive(section: Any, *keys: str) -> Iterator[str]:
    """Yield a line for each of `keys` that is set to zero or less."""
    for key in keys:
        value = getattr(section, key)
        if value is not None and not value > 0:
            yield f"{key} must be above 0, got {value}"


def ignored(section: Any, *keys: str, when: str, prefix: str = "") -> Iterator[str]:
    """Yield a line for each of `keys` that is not at its default although it has no effect: the
    line says `when` that is so, as in "with kind preset". `prefix` goes before the keys."""
    for each in fields(section):
        default = each.default if each.default is not MISSING else each.default_factory
        default = default() if callable(default) else default
        value = getattr(section, each.name)
        if each.name in keys and value != default:
            yield (
                f"{prefix}{each.name} must keep its default {shown(default)}, as it has no effect "
                f"{when}, got {shown(value)}"
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
    found = difflib.get_close_matches(word, list(options), n=1, cutoff=0.6)
    return found[0] if found else None
