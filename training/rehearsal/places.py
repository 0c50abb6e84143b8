"""Where in the program something happens: the innermost line of the project or of megatron-core."""

import sys
from functools import cache
from pathlib import Path
from types import FrameType

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
