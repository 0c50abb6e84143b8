"""Read JSON files that may be corrupt or malicious."""

import json
import os
from collections import Counter
from errno import EINVAL
from pathlib import Path
from typing import Any, Final

from training.errors import InputError

POINTER: Final = b"version https://git-lfs.github.com/spec/"
"""First bytes of a Git LFS pointer: a small file that stands in for a large file until the large
file is fetched."""
UNFETCHED: Final = "a Git LFS pointer, not the file itself: run git lfs pull"


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text.

    Raises ValueError if the text is not valid JSON or UTF-8, is nested too deeply, or contains an
    object with duplicate keys. (By default, `json` keeps only the last value of such a key.)
    """
    try:
        return json.loads(text, object_pairs_hook=_mapping)
    except RecursionError:
        raise ValueError("too many nested levels") from None
    except ValueError:
        head = text[: len(POINTER)]
        if head in (POINTER, POINTER.decode()):
            raise ValueError(f"the file is {UNFETCHED}") from None
        raise


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"keys of an object must be unique, got {key!r:.80} twice")
    return mapping


def is_pointer(path: Path) -> bool:
    """Return whether a file is a Git LFS pointer."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(POINTER)) == POINTER


KERNEL: Final = ("/proc", "/sys")
"""Folders of kernel files; reading these may block forever or have side effects."""


def real_path(path: str | Path) -> Path:
    """Resolve links in `path`. Unlike `Path.resolve`, this function raises no error for a loop of
    links; opening the returned path raises the error."""
    return Path(os.path.realpath(path))


def check_regular(path: Path) -> None:
    """Raise OSError for kernel files, FIFOs and all other files that are not regular, because
    reading them could block."""
    if path.exists() and not path.is_file():
        raise OSError(EINVAL, "Not a regular file", str(path))
    if any(real_path(path).is_relative_to(folder) for folder in KERNEL):
        raise OSError(EINVAL, "Not a file on disk", str(path))


def read_regular(path: Path) -> bytes:
    """Read a regular file on disk. Raises the OSError of `check_regular`."""
    check_regular(path)
    return path.read_bytes()


def read_json(path: str | Path) -> Any:
    """Parse a JSON file. Raises the OSError of `read_regular` and the ValueError of
    `parse_json`."""
    return parse_json(read_regular(Path(path)))


def check_shape(value: Any, shape: Any, name: str) -> None:
    """Raise InputError for the first part of `value` that does not match `shape`.

    A shape is one of: a type or a union of types; `[shape]`, for a list of any length; a mapping
    from required keys to shapes. In a mapping, the key `...` matches all other keys. `name` is the
    name of the value in error messages.
    """
    if isinstance(shape, list):
        if not isinstance(value, list):
            raise InputError(f"{name} must be a list, got {value!r:.60}")
        for i, each in enumerate(value):
            check_shape(each, shape[0], f"{name}[{i}]")
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            raise InputError(f"{name} must be a mapping, got {value!r:.60}")
        for key in shape:
            if key is not ... and key not in value:
                raise InputError(f"{name} must have the key {key}")
        for key, each in value.items():
            if key in shape or ... in shape:
                check_shape(each, shape[key] if key in shape else shape[...], f"{name}.{key}")
    elif not isinstance(value, shape) or (isinstance(value, bool) and shape is not bool):
        kind = getattr(shape, "__name__", str(shape))
        raise InputError(f"{name} must be of type {kind}, got {value!r:.60}")
