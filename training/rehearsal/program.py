"""Locate the source lines of events in the rehearsed program, and patch the program's functions."""

import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Final

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ENGINE = "/megatron/core/"


def call_site() -> str:
    """Return `file:line` of the innermost frame in megatron-core or in the project, not counting
    rehearsals. Return `?` if there is no such frame."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = name_of(frame.f_code.co_filename)
        if name is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@cache
def name_of(path: str) -> str | None:
    """Return the name of a file that belongs to megatron-core or to the project, not counting
    rehearsals. Return None for other files."""
    if path.startswith(str(HERE)):
        return None
    if ENGINE in path:
        return "megatron/core/" + path.split(ENGINE)[1]
    if path.startswith(f"{ROOT}/") and "/site-packages/" not in path:
        return path[len(str(ROOT)) + 1 :]
    return None


PACKAGES: Final = ("spectral", "models", "parallel", "training")
OWN: Final = "training.rehearsal."


def put(owner: object, name: str, thing: object) -> None:
    """Replace an existing attribute of a module or class with `thing`.

    Raises AttributeError if the attribute does not exist, e.g. because it was moved.
    """
    getattr(owner, name)
    setattr(owner, name, thing)


def replace_everywhere(old: object, new: object) -> None:
    """Replace the function `old` with `new` in all project modules that have imported it.

    Raises LookupError if only rehearsal modules have imported it.
    """
    uses = [
        (module, key)
        for name, module in list(sys.modules.items())
        if name.split(".")[0] in PACKAGES
        for key, value in list(vars(module).items())
        if value is old
    ]
    if all(module.__name__.startswith(OWN) for module, _ in uses):
        raise LookupError(f"no module of the project defines {old!r}")
    for module, key in uses:
        setattr(module, key, new)
