"""Text for terminals and Markdown: tables, counts, durations, and progress lines on stderr."""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final


def table(
    header: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: bool = False
) -> str:
    """Format a table with left-aligned columns. If `numbers` is true, all columns but the first are
    right-aligned.

    A header whose cells are all empty is omitted.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    if any(header):
        cells.insert(0, [str(cell) for cell in header])
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    just = [str.rjust if numbers and i else str.ljust for i in range(len(header))]
    lines = ("  ".join(j(c, w) for j, c, w in zip(just, row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table, with a newline after each line."""
    lines = [header, ["---"] * len(header), *rows]
    escaped = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def short(count: float) -> str:
    """Format a count with three significant digits and a unit, e.g. 1.84M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def duration(seconds: float) -> str:
    """Format `seconds` as h:mm:ss, or as `?` if the number is not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


FIRST: Final = 10.0
"""Seconds until the first progress line."""
GROWTH: Final = 0.1
"""Interval between progress lines as a fraction of the elapsed time. The interval is at least
`FIRST` seconds."""

_open: list[Callable[[], str]] = []


@contextmanager
def progress(state: Callable[[], str]) -> Iterator[None]:
    """Print the elapsed time and `state()` to stderr at growing intervals while the block runs.

    If blocks are nested, only the innermost block prints. A block that ends within `FIRST` seconds
    prints nothing.
    """
    start, ended = time.monotonic(), threading.Event()

    def report() -> None:
        while not ended.wait(pause(time.monotonic() - start)):
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


def pause(passed: float) -> float:
    """Return the number of seconds to wait before the next progress line. `passed` is the number of
    seconds since the start."""
    return max(FIRST, GROWTH * passed)
