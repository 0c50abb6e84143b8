"""The C compiler that Triton needs on this machine for the launcher of every kernel."""

import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

PROBE = "#include <Python.h>\nint version(void) { return PY_VERSION_HEX; }\n"
PACKAGES = "gcc and python3-dev on Debian and Ubuntu, gcc and python3-devel on Fedora and RHEL"


def compiler_problem() -> str | None:
    """Return what is missing to compile a module of Python as Triton does, None if nothing."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return f"a C compiler (packages: {PACKAGES})"
    include = sysconfig.get_paths()["include"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.c"
        source.write_text(PROBE)
        command = [
            compiler,
            str(source),
            "-shared",
            "-fPIC",
            f"-I{include}",
            "-o",
            f"{folder}/p.so",
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            return f"a C compiler: {compiler} does not start ({error.strerror})"
    if done.returncode == 0:
        return None
    if "Python.h" in done.stderr:
        return f"Python.h, which is not in {include} (packages: {PACKAGES})"
    return f"a C compiler that works: {compiler} says {done.stderr.strip().splitlines()[:1]}"
