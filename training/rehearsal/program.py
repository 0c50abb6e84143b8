"""The program that is rehearsed: the line at which something happens, and functions replaced
wherever they are known by name.
"""

import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Final

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ENGINE = "/megatron/core/"


def place() -> str:
    """Return `file:line` of the innermost frame of the project or of megatron-core, rehearsals left
    out; `?` without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = name_of(frame.f_code.co_filename)
        if name is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@cache
def name_of(path: str) -> str | None:
    """Return a file of the project or of megatron-core, None for others and for
    rehearsals."""
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
    """Put `thing` in the place of an attribute of a module or class, which must have it.

    Raises AttributeError if it has not: what is to be replaced has moved.
    """
    getattr(owner, name)
    setattr(owner, name, thing)


def replace(old: object, new: object) -> None:
    """Put `new` in the place of a function in every module of the project that has imported it.

    Raises LookupError if none has but the rehearsal itself.
    """
    places = [
        (module, key)
        for name, module in list(sys.modules.items())
        if name.split(".")[0] in PACKAGES
        for key, value in list(vars(module).items())
        if value is old
    ]
    if all(module.__name__.startswith(OWN) for module, _ in places):
        raise LookupError(f"no module of the project has {old!r}")
    for module, key in places:
        setattr(module, key, new)
