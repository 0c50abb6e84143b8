"""docs/architecture.md names files that exist and draws the floors that imports obey."""

import re
from pathlib import Path

import pytest

from tests.unit.test_wings import FLOORS

NAME = re.compile(r"[\w.]+(?:/[\w.]+)*(?:/|\.(?:py|md|yaml|json))")


def page(root: Path) -> str:
    """The page as text."""
    return (root / "docs" / "architecture.md").read_text()


def named(text: str) -> set[str]:
    """Files and folders that a text has in backticks or links to, relative to the root."""
    quoted = {name for name in re.findall(r"`([^`\s]+)`", text) if NAME.fullmatch(name)}
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)}
    return quoted - {"__init__.py"} | {str(Path("docs") / link) for link in links if link}


def floors(text: str, package: str) -> list[set[str]]:
    """The floors in the box of a package, from the ground up, by names without endings."""
    box = text.split(f"+-- {package}/ ")[1].split("  +--")[0].splitlines()[1:]
    lines = [re.findall(r"\b(\w+)(?:\.py|/)(?=\s)", line) for line in box]
    return [set(names) for names in reversed(lines) if names]


def table(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_file_and_folder_on_the_page_exists(root: Path) -> None:
    names = named(page(root))
    assert len(names) > 80
    assert [name for name in sorted(names) if not (root / name).exists()] == []


@pytest.mark.parametrize("package", FLOORS)
def test_the_picture_has_the_floors_that_imports_obey(root: Path, package: str) -> None:
    assert floors(page(root), package) == FLOORS[package]


def test_names_in_the_step_exist(root: Path) -> None:
    section = page(root).split("## One training step\n")[1].split("\n## ")[0]
    for path, owner, name in re.findall(r"`([\w/]+\.py)` \(`(\w+)\.(\w+)`\)", section):
        source = (root / path).read_text()
        assert f"class {owner}" in source and f"def {name}(" in source, f"{path}: {owner}.{name}"


def test_the_glossary_says_each_word_once(root: Path) -> None:
    words = [cells[0] for cells in table(page(root), "Glossary")]
    assert len(words) == len(set(words)) >= 20
    assert {
        "unit", "role", "rule", "owner", "owned unit", "transfer", "bucket", "shard", "span",
        "domain", "stage", "group", "layout", "run", "monitored step", "inspection",
    } <= set(words)  # fmt: skip


def test_every_change_has_a_place_and_a_test(root: Path) -> None:
    rows = table(page(root), "Where do I change what")
    assert len(rows) >= 20
    for change, places, test in rows:
        assert named(places) and named(test), change


@pytest.mark.parametrize("reader", ["README.md", "CONTRIBUTING.md"])
def test_newcomers_are_sent_to_the_page(root: Path, reader: str) -> None:
    assert "(docs/architecture.md" in (root / reader).read_text()


def test_what_is_missing_is_found() -> None:
    assert named("`parallel/nowhere.py`, `a.b`, [x](gone.md#there)") == {
        "parallel/nowhere.py",
        "docs/gone.md",
    }
    picture = "+-- parallel/ --- what\n  | a/  b.py   words |\n  | c/   words |\n  +---+"
    assert floors(picture, "parallel") == [{"c"}, {"a", "b"}]
