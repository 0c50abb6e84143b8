"""The environment, the Makefile, CI and the README agree with each other."""

import os
import re
import shutil
import subprocess
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.commands import output_of
from tests.paths import ROOT
from tests.processor_time import FIRST, ProcessorTime


def make(folder: Path, *arguments: str) -> str:
    """Return the commands that `make --dry-run` prints with these arguments in `folder`."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "MAKEFLAGS")}
    command = ["make", "--dry-run", "--no-print-directory", *arguments]
    return output_of(*command, folder=folder, variables=environment)


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """A checkout without an environment or data."""
    for name in ("requirements", "scripts"):
        shutil.copytree(root / name, tmp_path / name)
    shutil.copy(root / "Makefile", tmp_path)
    return tmp_path


def test_setup_does_nothing_twice(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / ".installed").touch()
    assert "pip" not in make(checkout, "test")
    os.utime(checkout / "requirements" / "cpu.txt", (2**31, 2**31))
    assert "pip" in make(checkout, "test")


def test_every_pinned_package_runs_on_the_oldest_python(root: Path) -> None:
    """Debian 12 has Python 3.11.2."""
    text = "".join((root / "requirements" / f"{x}.txt").read_text() for x in ("cpu", "constraints"))
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE))
    needed = {
        each.name: each.metadata["Requires-Python"]
        for each in distributions()
        if pins.get(each.name) == each.version and each.metadata["Requires-Python"]
    }
    assert len(needed) > 80
    assert [n for n, needs in needed.items() if "3.11.0" not in SpecifierSet(needs)] == []


def test_train_sets_up_prepares_and_trains(checkout: Path) -> None:
    plan = make(checkout, "train")
    order = [plan.index(part) for part in ("pip install", "prepare_data.py --demo", "pretrain.py")]
    assert order == sorted(order)
    assert ".venv/bin/python pretrain.py --ranks 2" in plan
    assert "--config configs/tiny_sso.yaml" in plan


def test_parts_of_the_suite_run_by_name_and_cover_it(checkout: Path) -> None:
    shutil.copytree(ROOT / "tests", checkout / "tests", ignore=shutil.ignore_patterns("data"))
    plain = make(checkout, "test", "PYTHON=python")
    folders = {path.parts[1] for path in map(Path, re.findall(r"tests/\w+", plain))}
    holding = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    tops = {path.relative_to(ROOT / "tests").parts[0] for path in holding}
    assert folders == tops - {"cluster"}
    whole = make(checkout, "test-all", "PYTHON=python")
    assert whole.count("-m pytest") == 4
    # A test in it compares two engines.
    assert whole.index("megatron-core==") < whole.index("-m slow tests --ignore=tests/cluster")
    assert [
        path for path in re.findall(r"tests/[\w/.]+", whole) if not (ROOT / path).exists()
    ] == []
    one = make(checkout, "test-all", "PYTHON=python", "PART=fuzz engine")
    assert one.count("-m pytest") == 3 and "-m slow" in one and "PYTHONPATH=.engines/" in one
    # Tests named by a part are ignored by the others, so each slow test runs once.
    slow = make(checkout, "test-all", "PYTHON=python", "PART=recipes studies ranks rest")
    assert slow.count("tests/unit/recipes") == 3 and slow.count("--ignore=tests/unit/recipes") == 2


def test_ci_runs_what_the_readme_says(root: Path) -> None:
    script = root / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.findall(r"^make \w+$", script.read_text(), re.MULTILINE) == ["make lint", "make test"]
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_helpers_of_tests_are_on_their_page(root: Path) -> None:
    page = (root / "tests" / "README.md").read_text()
    named = set(re.findall(r"^\| `(\w+\.py)` \|", page, re.MULTILINE))
    assert named == {path.name for path in (root / "tests").glob("*.py")} - {"conftest.py"}


def test_a_file_that_takes_a_large_share_of_make_test_is_named() -> None:
    measured = ProcessorTime()
    measured.files = dict.fromkeys(map(str, range(120)), 1.0) | {FIRST[0]: 50.0, "slow": 20.0}
    assert measured.too_slow() == ["slow"]
    measured.files = {"slow": 20.0}  # a run of one file
    assert measured.too_slow() == []
