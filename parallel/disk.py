"""Utilities for files and folders on disk."""

import itertools
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

SIDE_BY_SIDE = 16
"""Number of files to sync concurrently."""


def sync(path: Path) -> None:
    """Flush a file's contents, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(paths: Iterable[Path]) -> None:
    """Sync files and folders concurrently.

    A slow disk can sync many files in the time it takes to sync one.
    """
    with ThreadPoolExecutor(max_workers=SIDE_BY_SIDE) as pool:
        list(pool.map(sync, paths))


def replace_file(path: Path, content: str | bytes, *, synced: bool = False) -> None:
    """Replace a file atomically: readers see either the old or the new contents, never a mix.

    The contents are first written to a temporary file next to `path`, so a link at `path` is
    replaced rather than followed. The folder must exist, and no other process may replace the same
    file at the same time. With `synced`, the file and its folder are flushed to disk.
    """
    new = path.with_name(f".writing-{path.name}")
    new.unlink(missing_ok=True)
    try:
        with new.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        if synced:
            sync(new)
        new.replace(path)
        if synced:
            sync(path.parent)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def free_name(path: Path) -> Path:
    """Return the first of `path`, path.1, path.2, ... that does not exist."""
    names = (path.with_name(f"{path.name}.{n}") if n else path for n in itertools.count())
    return next(name for name in names if not name.exists())


def delete(path: Path) -> None:
    """Delete a file, a link, or a folder and its contents."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
