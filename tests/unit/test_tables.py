"""Tables of pages have the figures of the committed files that they name."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.paths import ROOT

Rows = list[list[str]]


def msign(content: dict[str, Any]) -> Rows:
    """Steps and dtype, error, gains and |f|."""
    return [
        [
            f"{row['steps']}{' of `simple`' * (row['schedule'] == 'simple')}, {row['dtype']}",
            f"{row['error']:.3f}",
            f"{row['worst error']:.3f}",
            f"{row['least gain']:.3f} to {row['greatest gain']:.3f}",
            f"{row['largest |f|']:.1e}" if row["largest |f|"] else "0",
        ]
        for row in content["settings"]
    ]


TABLES: list[tuple[str, str, Callable[[dict[str, Any]], Rows]]] = [
    ("numerics.md", "msign.json", msign),
]


@pytest.mark.parametrize(("page", "file", "rows"), TABLES, ids=lambda value: str(value))
def test_a_table_has_the_figures_of_its_file(
    page: str, file: str, rows: Callable[[dict[str, Any]], Rows]
) -> None:
    content = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    _, named, after = (ROOT / "docs" / page).read_text().partition(f"benchmarks/results/{file}")
    assert named
    lines = after[after.index("\n|") :].lstrip().split("\n\n")[0].splitlines()[2:]
    assert [line.strip("| ").split(" | ") for line in lines] == rows(content)
