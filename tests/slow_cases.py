"""Cases of parametrised tests; `make test` runs a few of them."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the parameters of `cases` (tuples for several parameters); all cases outside `fast`
    are slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if case in fast else [pytest.mark.slow],
        )
        for case in cases
    ]
