"""A CUDA driver stub for PyTorch's C++ code, built once per environment.

This module imports neither torch nor the project, because `load` must run before both are imported.
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
    """Raised when a machine or process cannot run rehearsals."""


def load() -> None:
    """Simulate a CUDA device for PyTorch's C++ code in this process, and import torch.

    Raises GuardError if torch is already imported, or if the C++ compiler is missing or fails.
    """
    if "torch" in sys.modules:
        raise GuardError("a rehearsal must run in a new process, but torch is already imported")
    library = ctypes.CDLL(str(built()), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401

    library.install_guard()


def built() -> Path:
    """Return the path of the compiled library. If the library does not exist, compile it first."""
    facts = "".join([version("torch"), str(torch_folder()), *FLAGS])
    key = hashlib.sha256(SOURCE.read_bytes() + facts.encode()).hexdigest()[:16]
    library = cache() / f"guard-{key}.so"
    if not library.exists():
        _compile(library)
    return library


def cache() -> Path:
    """Return the folder for the compiled library: in the user's cache or, if that is not possible,
    in the folder for temporary files.

    If other users can write to an existing temporary folder, a new folder is created.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for folder in (home / "spectrain", Path(tempfile.gettempdir()) / f"spectrain-{os.getuid()}"):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = folder.lstat()  # a link is no folder
            private = facts.st_uid == os.getuid() and not facts.st_mode & 0o022
            if stat.S_ISDIR(facts.st_mode) and private and os.access(folder, os.W_OK):
                return folder
    return Path(tempfile.mkdtemp(prefix="spectrain-"))


def torch_folder() -> Path:
    """Return torch's folder without importing torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _compile(library: Path) -> None:
    """Compile the source, then move the result to `library` atomically."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise GuardError(
            f"the first rehearsal requires a C++ compiler, but {compiler} does not exist: install "
            "g++ (apt-get install g++), or set CXX to another compiler"
        )
    torch = torch_folder()
    headers = [torch / "include", torch / "include/torch/csrc/api/include"]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        target = Path(folder) / library.name
        command = [
            compiler, *FLAGS, *(f"-I{path}" for path in headers), str(SOURCE), "-o", str(target),
            f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            first = next((s for s in done.stderr.splitlines() if "error" in s), done.stderr)
            raise GuardError(f"{command[0]} cannot compile {SOURCE.name}: {first.strip()}")
        target.replace(library)
