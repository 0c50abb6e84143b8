"""The support matrix of docs/parallelism.md agrees with the config checks."""

from pathlib import Path

from models.families import FAMILIES as ALL
from tests.support_matrix import FAMILIES, ROWS, cells, with_table


def test_the_page_has_the_matrix_of_today(root: Path) -> None:
    written = (root / "docs" / "parallelism.md").read_text()
    assert written == with_table(written), "run: python -m tests.support_matrix"


def test_every_family_runs_on_most_layouts_of_its_axes() -> None:
    dense = [row for row, (axes, _) in ROWS.items() if not {"expert", "expert_tensor"} & {*axes}]
    runs = [cell for cell, said in cells().items() if not said]
    for family in FAMILIES:
        rows = list(ROWS) if ALL[family].mixture else dense
        assert sum(other == family for _, other in runs) > 0.8 * len(rows)
