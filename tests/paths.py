"""The path to the repository, and the generated tables in its pages."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""Repository root."""


def with_table(page: str, name: str, table: str) -> str:
    """Return the text of a page in docs/ with `table` between the markers of this name."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, rest = (ROOT / "docs" / page).read_text().split(begin)
    return f"{before}{begin}{table}{end}{rest.split(end)[1]}"
