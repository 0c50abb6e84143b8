"""The path of the repository, and tables of its pages that programs write."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The repository's root."""


def with_table(page: str, name: str, table: str) -> str:
    """Return the text of a page of docs/ with `table` between its marks of that name."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, rest = (ROOT / "docs" / page).read_text().split(begin)
    return f"{before}{begin}{table}{end}{rest.split(end)[1]}"
