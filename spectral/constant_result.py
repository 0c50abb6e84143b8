"""Marks functions whose result torch.compile takes as a constant."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def constant_result(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function as `torch.compiler.assume_constant_result` does.

    That one imports the compiler, which takes as long as all of torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
