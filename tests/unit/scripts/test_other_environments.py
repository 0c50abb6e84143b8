"""Scripts that use what a machine may lack say what they miss, with exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest


def refusal(root: Path, *command: str) -> str:
    """The one line that a script that must stop says."""
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "arguments must be TARGET PYTHON [ARGUMENT ...], got nothing"),
        (["gpu", sys.executable], "TARGET must be one of cpu cuda, got gpu"),
        (["cpu", "/no/python"], "PYTHON must be an interpreter, got /no/python"),
        (["cpu", "{folder}/python"], "PYTHON must have a folder of its own, not Debian's /usr"),
    ],
)
def test_image_needs_an_interpreter(
    root: Path, tmp_path: Path, arguments: list[str], text: str
) -> None:
    of_debian = tmp_path / "python"
    of_debian.write_text(f"#!/bin/sh\nexec {sys.executable} -c \"print('/usr')\"\n")
    of_debian.chmod(0o755)
    arguments = [each.format(folder=tmp_path) for each in arguments]
    assert refusal(root, "scripts/build_image.sh", *arguments).startswith(f"error: {text}")


def test_python_that_nobody_has_is_said(root: Path) -> None:
    said = refusal(root, "scripts/test_pythons.sh", "3.99")
    assert said == "Python 3.99 is not tested: no python3.99 on PATH, in uv or in pyenv"


@pytest.mark.parametrize("version", ["3", "2.7", "3.10", "3.12.1", "python3.12"])
def test_python_that_the_project_does_not_take_is_refused(root: Path, version: str) -> None:
    said = refusal(root, "scripts/test_pythons.sh", "3.99", version)
    assert said == f"error: versions must be 3.11 or newer, such as 3.12, got {version}"


@pytest.mark.parametrize("version", ["", "banana", "../0.19.2", ">=0.17", "0.19.2 rc"])
def test_engine_must_be_a_release(root: Path, version: str) -> None:
    said = refusal(root, sys.executable, "scripts/engine.py", version)
    assert said == f"error: version must be a release such as 0.19.2, got {version!r}"


def test_engine_must_be_one_that_the_project_takes(root: Path) -> None:
    said = refusal(root, sys.executable, "scripts/engine.py", "0.15.3")
    assert said == "error: version must be 0.16.1 or newer, got '0.15.3'"
