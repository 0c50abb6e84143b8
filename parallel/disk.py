"""Files and folders on the disk."""

import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

SIDE_BY_SIDE = 16
"""Files that are synced at the same time."""


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(paths: Iterable[Path]) -> None:
    """Sync files and folders side by side, as a slow disk takes as long for many as for one."""
    with ThreadPoolExecutor(max_workers=SIDE_BY_SIDE) as pool:
        list(pool.map(sync, paths))


def replace_file(path: Path, content: str | bytes, *, synced: bool = False) -> None:
    """Write a file of which others see the old or the new content, and no part of it.

    It is written next to the old one, so that nothing is written through a link. Its folder must
    exist, and no other process may replace the same file; `synced` is whether file and folder are
    synced to the disk.
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


def delete(path: Path) -> None:
    """Delete a folder with its content; of a link or a file only itself."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
