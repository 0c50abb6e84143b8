"""Seconds from a failure to the first new step."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any


class Repairs:
    """Collects how long repairs took."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def taking(self, what: str, **settings: float) -> Iterator[None]:
        """Context of one repair, which it prints; `settings` are seconds that it depends on."""
        began = time.monotonic()
        yield
        seconds = round(time.monotonic() - began, 1)
        self.taken.append({"failure": what, "seconds": seconds, "settings": settings})
        print(f"repaired after {seconds} s: {what} {settings or ''}")
