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
