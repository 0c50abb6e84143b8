"""Run commands in separate processes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.paths import ROOT


def output_of(
    *command: str | Path,
    folder: Path = ROOT,
    variables: Mapping[str, str] = os.environ,
    code: int = 0,
) -> str:
    """Run a command that must exit with `code`. Return its output and, if `code` is not 0, its
    errors. `variables` is the environment of the command."""
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + (done.stderr if code else "")


def interpreted(*files: str) -> None:
    """Run the tests in `files` in Triton's interpreter."""
    options = ["-q", "-x", "-p", "no:cacheprovider"]
    variables = os.environ | {"TRITON_INTERPRET": "1"}
    output_of(sys.executable, "-m", "pytest", *options, *files, variables=variables)


def torchrun(ranks: int) -> tuple[str, ...]:
    """Return the Python arguments that launch a program on `ranks` ranks of one node."""
    return "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"


def copy_repository(target: Path, *options: str) -> None:
    """Copy the files listed by `git ls-files`, with options, to a folder."""
    for name in filter(None, output_of("git", "ls-files", "-z", *options).split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
