"""Cases of parametrised tests, of which `make test` only runs a few."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return pytest parameters for `cases` (tuples for several parameters), marking cases not in
    `fast` as slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if case in fast else [pytest.mark.slow],
        )
        for case in cases
    ]
