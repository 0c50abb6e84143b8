"""Reading JSON that may be damaged or made to do harm."""

import json
import os
from errno import EINVAL
from pathlib import Path
from typing import Any, Final

from training.errors import InputError

POINTER: Final = b"version https://git-lfs.github.com/spec/"
"""How a file of text begins that Git LFS keeps instead of a large one."""
UNFETCHED: Final = "a Git LFS pointer, not the file itself: git lfs pull"


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text holds. Raises ValueError, also for one that is nested too deeply or
    is not UTF-8."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        head = text[: len(POINTER)]
        if head in (POINTER, POINTER.decode()):
            raise ValueError(f"it is {UNFETCHED}") from None
        raise


def is_pointer(path: Path) -> bool:
    """Return whether a file is one that Git LFS keeps instead of a large one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(POINTER)) == POINTER


KERNEL: Final = ("/proc", "/sys")
"""Folders of files that the kernel makes: to read one may wait for ever, or change something."""


def real_path(path: str | Path) -> Path:
    """Return a path with links followed. A loop of links, of which `Path.resolve` makes a
    RuntimeError, is left for who opens the file, which is an OSError."""
    return Path(os.path.realpath(path))


def check_regular(path: Path) -> None:
    """Raise OSError for a FIFO, which would hang, and for a file that the kernel makes."""
    if path.exists() and not path.is_file():
        raise OSError(EINVAL, "Not a regular file", str(path))
    if any(real_path(path).is_relative_to(folder) for folder in KERNEL):
        raise OSError(EINVAL, "Not a file on a disk", str(path))


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file on a disk. Raises OSError as `check_regular` does."""
    check_regular(path)
    return path.read_bytes()


def read_json(path: str | Path) -> Any:
    """Return what a JSON file holds. Raises OSError as `read_regular` does, or ValueError as
    `parse_json` does."""
    return parse_json(read_regular(Path(path)))


def check_shape(value: Any, shape: Any, place: str) -> None:
    """Raise InputError for the first thing in `value` that has not its shape.

    A shape is a type or a union of types; `[shape]`, a list of any length; or a mapping with the
    shapes of keys that must be there, of which `...` stands for all other keys. `place` names the
    value.
    """
    if isinstance(shape, list):
        if not isinstance(value, list):
            raise InputError(f"{place} must be a list, got {value!r:.60}")
        for i, each in enumerate(value):
            check_shape(each, shape[0], f"{place}[{i}]")
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            raise InputError(f"{place} must be a mapping, got {value!r:.60}")
        for key in shape:
            if key is not ... and key not in value:
                raise InputError(f"{place} lacks {key}")
        for key, each in value.items():
            if key in shape or ... in shape:
                check_shape(each, shape[key] if key in shape else shape[...], f"{place}.{key}")
    elif not isinstance(value, shape) or (isinstance(value, bool) and shape is not bool):
        kind = getattr(shape, "__name__", str(shape))
        raise InputError(f"{place} must be of type {kind}, got {value!r:.60}")
