"""Cases of parametrised tests of which `make test` takes a few."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the parameters of `cases`, a tuple for several; all that are not `fast` are slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if case in fast else [pytest.mark.slow],
        )
        for case in cases
    ]
