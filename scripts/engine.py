"""Lay another release of megatron-core beside the installed one, to run with it.

    export PYTHONPATH=$(python scripts/engine.py 0.19.2)
    python pretrain.py --config configs/tiny_moe_sso.yaml

Releases are published for some versions of Python only, though their files run under others; so the
wheel is unpacked, not installed, and its one extension is built for this Python, which takes g++.
"""

import argparse
import compileall
import fcntl
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from packaging.version import InvalidVersion, Version

from models.engine import TESTED
from scripts.command import command
from training.errors import InputError

FOLDER: Final = ROOT / ".engines"
EXTENSION: Final = Path("megatron/core/datasets/helpers")
PYTHONS: Final = ("3.12", "3.13", "3.11", "3.10")
"""Versions of Python for which a wheel is looked for, one after the other."""


class EngineUnavailable(InputError):
    """A release that cannot be had here."""


def engine_folder(version: str) -> Path:
    """Return the folder to put on PYTHONPATH for a release, made if there is none.

    Raises InputError if it is no release that the project takes, and EngineUnavailable if the wheel
    cannot be downloaded or its extension not be built.
    """
    try:
        release = Version(version)
    except InvalidVersion as error:
        raise InputError(
            f"version must be a release such as {TESTED[1]}, got {version!r:.40}"
        ) from error
    if release < Version(TESTED[0]):
        raise InputError(f"version must be {TESTED[0]} or newer, got {version!r:.40}")
    FOLDER.mkdir(exist_ok=True)
    place = FOLDER / f"{release}-{sysconfig.get_config_var('SOABI')}"
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            with tempfile.TemporaryDirectory(dir=FOLDER) as name:
                made = Path(name) / "engine"
                with zipfile.ZipFile(download(f"megatron-core=={release}", Path(name))) as wheel:
                    wheel.extractall(made)
                build(made / EXTENSION)
                compile_files(made)
                made.rename(place)
    return place


def download(requirement: str, folder: Path) -> Path:
    """Return the path of a package's wheel, for any Python, downloaded into `folder`.

    Raises EngineUnavailable with what pip says.
    """
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    said = ""
    for python in PYTHONS:
        target = ["--python-version", python, "--dest", str(folder)]
        pip = [sys.executable, "-m", "pip", "download", *options, *target, requirement]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        wheels = list(folder.glob("*.whl"))
        if wheels:
            return wheels[0]
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
    raise EngineUnavailable(f"{requirement} cannot be downloaded: {said}")


def build(source: Path) -> None:
    """Compile the extension `source`.cpp for this Python."""
    import torch

    if shutil.which("g++") is None:
        raise EngineUnavailable("g++ must be installed to build an extension of megatron-core")
    library = source.with_name(f"{source.name}_cpp{sysconfig.get_config_var('EXT_SUFFIX')}")
    headers = [sysconfig.get_paths()["include"], Path(torch.__file__).parent / "include"]
    done = subprocess.run(
        [
            *("g++", "-O2", "-shared", "-std=c++17", "-fPIC"),
            *(f"-I{each}" for each in headers),  # torch brings pybind11
            *(str(source.with_suffix(".cpp")), "-o", str(library)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        line = next(iter(done.stderr.strip().splitlines()), "g++ said nothing")
        raise EngineUnavailable(f"the extension of megatron-core cannot be built: {line}")


def compile_files(folder: Path) -> None:
    """Write the bytecode of all files, as pip does: what Python warns of there is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compileall.compile_dir(folder, quiet=2)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Unpack a release of megatron-core in .engines and print its folder."
    )
    parser.add_argument("version", help="such as 0.19.2")
    return parser.parse_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    print(engine_folder(parse(arguments).version))
    return 0


if __name__ == "__main__":
    sys.exit(main())
