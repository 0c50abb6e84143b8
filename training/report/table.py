"""Tables, counts and times as text for a terminal or Markdown."""

import math
from collections.abc import Iterable, Sequence


def table(
    header: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: bool = False
) -> str:
    """Return a table with left-aligned columns; if `numbers` is true, all columns except the first
    are right-aligned.

    An empty header is omitted.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    if any(header):
        cells.insert(0, [str(cell) for cell in header])
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    just = [str.rjust if numbers and i else str.ljust for i in range(len(header))]
    lines = ("  ".join(j(c, w) for j, c, w in zip(just, row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, with a newline after each line."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def short(count: float) -> str:
    """Return a count with three digits and a unit, such as 1.84M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def duration(seconds: float) -> str:
    """Return `seconds` as h:mm:ss, or `?` if `seconds` is not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
