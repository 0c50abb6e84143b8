"""The environment, the Makefile, CI and the README agree with each other."""

import os
import re
import shutil
import subprocess
import tomllib
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement


def make(folder: Path, *arguments: str) -> str:
    """What `make --dry-run` with these arguments would run in `folder`."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "MAKEFLAGS")}
    command = ["make", "--dry-run", "--no-print-directory", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """A checkout without environment and data."""
    for name in ("requirements", "scripts"):
        shutil.copytree(root / name, tmp_path / name)
    shutil.copy(root / "Makefile", tmp_path)
    return tmp_path


def targets(root: Path) -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*## ", (root / "Makefile").read_text(), re.MULTILINE))


def requirements(root: Path) -> dict[str, str]:
    """Version by lower-case name of every pinned package, on this Python."""
    pins: dict[str, str] = {}
    for path in (root / "requirements").glob("*.txt"):
        for line in path.read_text().splitlines():
            line = line.split("#")[0].strip()
            if not line or line.startswith("-"):
                continue
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate():
                (version,) = pin.specifier
                assert pin.name.lower() not in pins, f"{pin.name} is pinned twice"
                pins[pin.name.lower()] = version.version
    return pins


def test_setup_installs_torch_first_and_alone(checkout: Path) -> None:
    lines = [line for line in make(checkout, "setup").splitlines() if "pip install" in line]
    assert [line.split("-r ")[1] for line in lines] == [
        "requirements/torch.txt",
        "requirements/cpu.txt",
    ]


def test_setup_does_nothing_twice(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / ".installed").touch()
    assert "pip" not in make(checkout, "test")
    os.utime(checkout / "requirements" / "cpu.txt", (2**31, 2**31))
    assert "pip" in make(checkout, "test")


def test_train_sets_up_prepares_and_trains(checkout: Path) -> None:
    plan = make(checkout, "train")
    order = [plan.index(part) for part in ("pip install", "prepare_data.py --demo", "pretrain.py")]
    assert order == sorted(order)
    assert ".venv/bin/python -m torch.distributed.run" in plan
    assert "--nproc-per-node 2" in plan
    assert "--config configs/tiny_sso.yaml" in plan


@pytest.mark.parametrize(
    ("target", "had", "code"),
    [("test-engine", True, 0), ("test-engine", False, 2), ("test", True, 0), ("test", False, 0)],
)
def test_another_engine_is_tested_or_the_reason_printed(
    checkout: Path, target: str, had: bool, code: int
) -> None:
    """With an interpreter that prints what it would run, and has the engine or not."""
    python = checkout / "python"
    engine = "echo /opt/engine" if had else "echo error: no network >&2; exit 2"
    python.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = scripts/engine.py ]; then {engine}; exit; fi\n'
        'echo "ran $* with ${PYTHONPATH:-the installed engine}"\n'
    )
    python.chmod(0o755)
    variables = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "PYTHONPATH")}
    done = subprocess.run(
        ["make", target, f"PYTHON={python}"],
        cwd=checkout,
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    with_engine = [line for line in done.stdout.splitlines() if line.endswith("with /opt/engine")]
    assert len(with_engine) == had
    assert all("tests/distributed/test_moe.py" in line for line in with_engine)
    assert ("error: no network" in done.stderr) is not had
    if target == "test":
        assert ("cannot be had here" in done.stdout) is not had


@pytest.mark.parametrize("target", ["test", "test-engine"])
def test_the_engine_is_one_argument(checkout: Path, target: str) -> None:
    assert "scripts/engine.py '>=0.17')" in make(checkout, target, "ENGINE=>=0.17")


def test_another_interpreter_is_used_as_it_is(checkout: Path) -> None:
    plan = make(checkout, "PYTHON=/opt/python", "train", "test", "lint")
    assert "pip" not in plan
    assert ".venv" not in plan
    assert "/opt/python -m pytest" in plan


def test_ci_runs_what_the_readme_says(root: Path) -> None:
    script = root / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.findall(r"^make \w+$", script.read_text(), re.MULTILINE) == ["make lint", "make test"]
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_make_commands_in_the_documents_are_targets(root: Path) -> None:
    documents = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")]
    mentioned = {
        name
        for path in documents
        for name in re.findall(r"(?:^|`)make ([a-z-]+)", path.read_text(), re.MULTILINE)
    }
    assert mentioned >= {"train", "test", "lint"}
    assert mentioned <= targets(root)


def test_files_in_the_documents_exist(root: Path) -> None:
    folders, endings = "configs|scripts|docs|requirements|examples", "yaml|py|md|txt|sh|sbatch"
    pattern = rf"(?<![\w/])(?:{folders})/[\w/.-]*\.(?:{endings})\b"
    for path in [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")]:
        for name in re.findall(pattern, path.read_text()):
            assert (root / name).exists(), f"{path.name} names {name}"


def test_the_helpers_of_tests_are_on_their_page(root: Path) -> None:
    page = (root / "tests" / "README.md").read_text()
    named = set(re.findall(r"^\| `(\w+\.py)` \|", page, re.MULTILINE))
    assert named == {path.name for path in (root / "tests").glob("*.py")} - {"conftest.py"}


def test_the_pins_satisfy_the_library(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    pins = requirements(root)
    for requirement in project["dependencies"]:
        name, least = requirement.split(">=")
        assert [int(n) for n in pins[name].split(".")] >= [int(n) for n in least.split(".")]


@pytest.mark.parametrize("kind", [DeprecationWarning, FutureWarning, UserWarning])
def test_warnings_are_errors(kind: type[Warning]) -> None:
    with pytest.raises(kind, match="there is a newer way"):
        warnings.warn("there is a newer way", kind, stacklevel=1)
