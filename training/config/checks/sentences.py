"""Sentences about a section's keys that the config checks share."""

from collections.abc import Iterator
from typing import Any

from training.config.binding import closest


def at_least(section: Any, least: int, *keys: str) -> Iterator[str]:
    """A sentence for each of `keys` that is set to less than `least`."""
    for key in keys:
        value = getattr(section, key)
        if value is not None and value < least:
            yield f"{key} must be at least {least}, got {value}"


def positive(section: Any, *keys: str) -> Iterator[str]:
    """A sentence for each of `keys` that is set to zero or less."""
    for key in keys:
        value = getattr(section, key)
        if value is not None and not value > 0:
            yield f"{key} must be above 0, got {value}"


def named(word: str, options: Any) -> str:
    """`one of ..., got word`, with the option most like it."""
    near = closest(word, options)
    hint = f"; did you mean {near}?" if near else ""
    return f"one of {', '.join(options)}, got {word!r}{hint}"
