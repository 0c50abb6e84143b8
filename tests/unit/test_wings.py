"""Files never import each other in a circle, and no wing imports one above it."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGES = ("spectral", "models", "parallel", "training", "scripts")

FLOORS = {
    "parallel": [
        {"errors"},
        {"comm"},
        {"storage"},
        {"model"},
        {"optimizer"},
        {"plan", "checkpoint", "observe"},
    ],
    "training": [
        {"errors", "json_file"},
        {"config"},
        {"assignments", "schedule", "data", "machine"},
        {"report", "monitor", "control"},
        {"checkpoint"},
        {"lifecycle", "agreement"},
        {"evaluate"},
        {"samples"},
        {"loop"},
        {"run_log"},
        {"build"},
        {"restore", "dry_run"},
        {"planning"},
        {"run"},
        {"rehearsal"},
    ],
}
"""Wings and files of each package from the bottom up; those on one floor do not import each
other."""


def imported(source: str, package: str) -> Iterator[str]:
    """Dotted names that `source`, of `package`, imports, inside functions and for types too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def modules(root: Path) -> dict[str, tuple[str, str]]:
    """Source and package by dotted name of every module of the packages."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path.read_text(), ".".join(parts[:-1])
    return found


def graph(sources: dict[str, tuple[str, str]]) -> dict[str, set[str]]:
    """The modules that each module imports; a package's `__init__` may import its own modules."""
    return {
        name: {
            other
            for other in imported(text, package)
            if other in sources and other != name and not name.startswith(other + ".")
        }
        for name, (text, package) in sources.items()
    }


def climbs(name: str, other: str) -> bool:
    """Whether `other`, imported by the module `name`, is on its floor or above."""
    package, _, rest = name.partition(".")
    other_package, _, other_rest = other.partition(".")
    if package != other_package or package not in FLOORS or not rest or not other_rest:
        return False
    wing, other_wing = rest.split(".")[0], other_rest.split(".")[0]
    floor = {w: i for i, wings in enumerate(FLOORS[package]) for w in wings}
    return wing != other_wing and floor[other_wing] >= floor[wing]


def test_no_circles(root: Path) -> None:
    try:
        TopologicalSorter(graph(modules(root))).prepare()
    except CycleError as error:
        pytest.fail(f"files import each other: {' <- '.join(error.args[1])}")


def test_every_wing_has_a_floor_and_no_import_climbs(root: Path) -> None:
    sources = modules(root)
    for package, floors in FLOORS.items():
        found = {name.split(".")[1] for name in sources if name.startswith(package + ".")}
        assert found == set().union(*floors)
    found = [
        f"{name} imports {other}"
        for name, others in graph(sources).items()
        for other in sorted(others)
        if climbs(name, other)
    ]
    assert found == []


@pytest.mark.parametrize("text", ["import models.b", "from . import b", "from .b import c"])
def test_a_circle_is_found(text: str) -> None:
    sources = {"models.a": (text, "models"), "models.b": ("from models import a", "models")}
    with pytest.raises(CycleError):
        TopologicalSorter(graph(sources)).prepare()


@pytest.mark.parametrize(
    ("name", "other", "wrong"),
    [
        ("parallel.comm.groups", "parallel.storage.buffers", True),
        ("parallel.plan.planner", "parallel.observe.activations", True),
        ("parallel.storage.buffers", "parallel.comm.groups", False),
        ("training.config.schema", "training.config.binding", False),
        ("training.config.schema", "parallel.model", False),
    ],
)
def test_a_climb_is_found(name: str, other: str, wrong: bool) -> None:
    assert climbs(name, other) is wrong


def test_every_wing_says_what_lives_there(root: Path) -> None:
    for package in FLOORS:
        for path in sorted((root / package).glob("*/__init__.py")):
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert text.count(".") >= 3 and "Start with" in text, f"{path} does not say it"
