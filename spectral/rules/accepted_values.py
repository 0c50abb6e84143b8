"""Whether a value is what an annotation says, and what to say if it is not."""

import difflib
import math
from collections.abc import Iterable
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import torch
from torch import Tensor

WORDS: Final[dict[Any, str]] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    torch.dtype: "a torch.dtype",
    Tensor: "a 0-d tensor",
    NoneType: "None",
}
"""What messages call the types that values may have."""


def check_value(name: str, annotation: Any, value: object) -> None:
    """Raise TypeError for a value of another type than the annotation, and ValueError for one that
    is none of its literals or a number that is not finite.

    A bool is no number, and a float no integer. Annotations of other types than `WORDS` accept all.
    """
    types, literals = _accepted(annotation)
    if literals:
        require_choice(name, value, literals)
    elif not _fits(value, types):
        wanted = " or ".join(WORDS[kind] for kind in types)
        dtypes = {x for x in vars(torch).values() if isinstance(x, torch.dtype)}
        hint = nearest(value, dtypes if torch.dtype in types else ())
        raise TypeError(f"{name} must be {wanted}, got {value!r}{hint}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


@cache
def _accepted(annotation: Any) -> tuple[tuple[Any, ...], tuple[object, ...]]:
    """Return the types that an annotation joins, and its literals, with None if it is one."""
    joined = get_origin(annotation) in (Union, UnionType)
    types = get_args(annotation) if joined else (annotation,)
    literals = [x for kind in types if get_origin(kind) is Literal for x in get_args(kind)]
    if not all(kind is NoneType or get_origin(kind) is Literal for kind in types):
        return types, ()
    return types, (*literals, None) if literals and NoneType in types else tuple(literals)


def _fits(value: object, types: tuple[Any, ...]) -> bool:
    if type(value) in types or not WORDS.keys() >= {*types}:
        return True
    wider = ((float, Real), (int, Integral), (str, str), (Tensor, Tensor))
    like = any(kind in types and isinstance(value, bases) for kind, bases in wider)
    return like and not isinstance(value, bool)


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`; the nearest is suggested."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}{nearest(value, choices)}")


def nearest(name: object, known: Iterable[object]) -> str:
    """Return the end of a message that suggests what resembles a name, nothing if nothing does."""
    names = {str(x): x for x in known}
    close = difflib.get_close_matches(str(name), [*names], n=1)
    return f"; did you mean {names[close[0]]!r}?" if close else ""
