"""Progress lines on stderr while a command computes its result."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from training.report.table import duration

FIRST: Final = 10.0
"""Seconds before the first line."""
GROWTH: Final = 0.1
"""Time between lines as a share of the elapsed time; at least `FIRST` seconds."""

_open: list[Callable[[], str]] = []


@contextmanager
def progress(state: Callable[[], str], first: float | None = None) -> Iterator[None]:
    """Print the elapsed time and `state()` to stderr at growing intervals while the block runs.

    If blocks are nested, only the innermost block prints. A block that ends within `first` seconds
    (default: `FIRST`) prints no line.
    """
    start, shortest = time.monotonic(), FIRST if first is None else first
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(pause(time.monotonic() - start, shortest)):
            if _open[-1] is state:
                passed = duration(time.monotonic() - start)
                print(f"{passed} {state()}", file=sys.stderr, flush=True)

    _open.append(state)
    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _open.remove(state)


def pause(passed: float, first: float) -> float:
    """Return the seconds until the next line, given the seconds `passed` since the start."""
    return max(first, GROWTH * passed)
