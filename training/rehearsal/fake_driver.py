"""A CUDA driver that does nothing, for PyTorch's C++ code; it is built once per environment.

Importing this module imports neither torch nor the project, as `load` runs before both.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("fake_driver.cpp")
FLAGS: Final = ("-std=c++20", "-O1", "-shared", "-fPIC")


class GuardError(RuntimeError):
    """The library cannot be built on this machine."""


def load() -> None:
    """Give PyTorch's C++ code a CUDA device in this process, before torch is imported.

    Raises GuardError if there is no C++ compiler or it fails.
    """
    if "torch" in sys.modules:
        raise GuardError("a rehearsal needs its own process: torch is imported already")
    library = ctypes.CDLL(str(built()), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401

    library.install_guard()


def built() -> Path:
    """Return the library; compile it first if this environment has none."""
    library = cache() / f"guard-{key()}.so"
    if not library.exists():
        _compile(library)
    return library


def key() -> str:
    """Return a key of the source and the versions of torch and Python."""
    facts = "".join([version("torch"), str(torch_folder()), *FLAGS])
    return hashlib.sha256(SOURCE.read_bytes() + facts.encode()).hexdigest()[:16]


def cache() -> Path:
    """Return the folder for libraries: in the user's cache, else a temporary folder.

    The temporary folder is a new one if other users could write to the existing one.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for folder in (home / "spectrain", Path(tempfile.gettempdir()) / f"spectrain-{os.getuid()}"):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_private(folder):
                return folder
    return Path(tempfile.mkdtemp(prefix="spectrain-"))


def is_private(folder: Path) -> bool:
    """Return whether a path is a folder (not a link) that this user owns and no other user can
    write to."""
    facts = folder.lstat()
    private = facts.st_uid == os.getuid() and not facts.st_mode & 0o022
    return stat.S_ISDIR(facts.st_mode) and private and os.access(folder, os.W_OK)


def torch_folder() -> Path:
    """Return torch's folder without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def compiler() -> str:
    """Return the C++ compiler: the environment's CXX, else g++.

    Raises GuardError if there is none.
    """
    name = os.environ.get("CXX") or "g++"
    if shutil.which(name) is None:
        raise GuardError(
            f"the first rehearsal needs a C++ compiler, but there is no {name} here: install g++ "
            "(apt-get install g++), or set CXX to another compiler"
        )
    return name


def _compile(library: Path) -> None:
    """Compile the source to `library` atomically."""
    torch = torch_folder()
    headers = [torch / "include", torch / "include/torch/csrc/api/include"]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        target = Path(folder) / library.name
        command = [
            compiler(), *FLAGS, *(f"-I{path}" for path in headers), str(SOURCE), "-o", str(target),
            f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            first = next((s for s in done.stderr.splitlines() if "error" in s), done.stderr)
            raise GuardError(f"{command[0]} cannot compile {SOURCE.name}: {first.strip()}")
        target.replace(library)
