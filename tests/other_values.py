"""Different values for options, for tests that change every option."""

from typing import Any, Literal, get_args, get_origin, get_type_hints


def another(kind: type[Any], name: str, value: Any) -> Any:
    """Return a value for the dataclass field `name` that differs from `value`: another choice, the
    other bool, half a float, or twice an integer."""
    annotation = get_type_hints(kind)[name]
    for each in (annotation, *get_args(annotation)):
        if get_origin(each) is Literal:
            return next(choice for choice in get_args(each) if choice != value)
    if isinstance(value, bool):
        return not value
    return (value / 2 if isinstance(value, float) else value * 2) or 0.5
