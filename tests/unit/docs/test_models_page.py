"""The tables of docs/models.md agree with the recipes and units."""

from pathlib import Path

import pytest

from models.families import FAMILIES
from models.size import all_units, model_size
from tests.families import with_table
from training.config import load_config
from training.config.checks.roles import roles_of


def rows(root: Path, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading of the page."""
    page = (root / "docs" / "models.md").read_text()
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_large_recipe_has_a_row_with_its_numbers(root: Path) -> None:
    table = {cells[0].strip("`"): cells[1:-1] for cells in rows(root, "Sizes")}
    names = {path.stem for path in (root / "configs").glob("*.yaml")}
    sizes = {name.removesuffix("_sso") for name in names if name.endswith("_sso")}
    assert {size for size in sizes if not size.startswith("tiny")} == set(table)
    for size, cells in table.items():
        for optimizer in ("adamw", "muon", "muon_sphere", "sso") if size != "llama70b" else ():
            assert f"{size}_{optimizer}" in names
        config = load_config(root / "configs" / f"{size}_sso.yaml")
        model = config.model
        size_of = model_size(model, config.train.sequence_length)
        matrices = [
            unit
            for unit in all_units(model)
            if unit.is_matrix and unit.role not in ("embedding", "head")
        ]
        assert cells == [
            model.family,
            str(model.layers),
            str(model.hidden),
            f"{model.heads} / {model.query_groups} / {model.head_size}",
            str(model.ffn),
            f"{size_of.parameters:,}",
            f"{size_of.active_parameters:,}",
            f"{len(matrices):,}",
        ]


def test_every_family_is_on_the_page(root: Path) -> None:
    assert [cells[0] for cells in rows(root, "What sets the families apart")] == list(FAMILIES)
    written = (root / "docs" / "models.md").read_text()
    assert written == with_table(written), "run: python -m tests.families"


def test_every_role_is_on_the_page(root: Path) -> None:
    named = {role for cells in rows(root, "Roles and units") for role in cells[0].split(", ")}
    for path in (root / "configs").glob("*_sso.yaml"):
        assert set(roles_of(load_config(path).model, "head", True)) <= named


@pytest.mark.parametrize("size", ["gpt160m", "gpt405m", "gpt1.4b"])
def test_the_widths_of_the_swiglu_twins_are_on_the_page(root: Path, size: str) -> None:
    hidden = load_config(root / "configs" / f"{size}_sso.yaml").model.hidden
    width = round(8 / 3 * hidden / 64) * 64
    assert str(width) in (root / "docs" / "models.md").read_text()
