"""The path of the repository, and generated tables of its pages."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The repository's root."""


def with_table(page: str, name: str, table: str) -> str:
    """Return the text of a page of docs/ with `table` between its markers of that name."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, rest = (ROOT / "docs" / page).read_text().split(begin)
    return f"{before}{begin}{table}{end}{rest.split(end)[1]}"
