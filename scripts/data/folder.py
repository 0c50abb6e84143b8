"""A folder that appears complete or not at all."""

import fcntl
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from parallel.disk import delete, sync
from training.data.manifest import MANIFEST_FILE, Manifest, read_manifest
from training.errors import DataError, InputError

LOCK = ".preparing.lock"
"""End of the name of the file by which a run tells others that it is at work."""


class AtomicFolder:
    """Builds `output` in the folder `output.preparing`, and renames it when all is on disk.

    As a context manager: write to `path`; `commit` makes it `output`, and without a commit nothing
    is left. A killed run leaves `output.preparing`, which the next run removes; it holds the lock
    of `output.preparing.lock` until it has cleaned up, so that no two are at work. Without that
    file, folders of these names are somebody else's.

    Args:
        output: the folder.
        check: raises InputError unless `output` may be written to; called once no other run is at
            work, and again before `output` is replaced.

    Raises:
        InputError: another run is preparing the same folder, or has made one meanwhile; or a
            folder of somebody else is in the way.
    """

    def __init__(self, output: Path, check: Callable[[], None]) -> None:
        self.output = output
        self._check = check
        self.path = output.with_name(output.name + ".preparing")
        self._replaced = output.with_name(output.name + ".replaced")
        self._lock = output.with_name(output.name + LOCK)

    def __enter__(self) -> "AtomicFolder":
        self.output.parent.mkdir(parents=True, exist_ok=True)
        was_killed = self._lock.exists()
        self._locked = _lock(self._lock)
        if self._locked is None:
            raise InputError(f"another run is preparing {self.output}")
        try:
            self._begin(was_killed)
        except BaseException:
            self._release()
            raise
        return self

    def _begin(self, was_killed: bool) -> None:
        """Remove what a killed run left, check, and make the folder to write to."""
        leftovers = [path for path in (self.path, self._replaced) if os.path.lexists(path)]
        if leftovers and not was_killed:
            raise InputError(f"{leftovers[0]} is in the way, and is not left from a preparation")
        # Left by a run that was killed between the renames of `commit`.
        if self._replaced.exists() and not self.output.exists():
            self._replaced.rename(self.output)
        for leftover in (self.path, self._replaced):
            if os.path.lexists(leftover):
                delete(leftover)
        self._check()
        self.path.mkdir()

    def _release(self) -> None:
        assert self._locked is not None
        self._lock.unlink()
        os.close(self._locked)

    def commit(self) -> None:
        """Replace `output` by what was written."""
        for file in self.path.iterdir():
            sync(file)
        sync(self.path)
        self._check()
        if self.output.exists():
            self.output.rename(self._replaced)
        self.path.rename(self.output)
        sync(self.output.parent)
        if self._replaced.exists():
            delete(self._replaced)

    def __exit__(self, *_: object) -> None:
        if self.path.exists():
            delete(self.path)
        self._release()


def clean_up(output: Path) -> None:
    """Remove what a run left that was killed once `output` was complete, unless one is at work."""
    if output.with_name(output.name + LOCK).exists():
        with suppress(InputError), AtomicFolder(output, lambda: None):
            pass


def _lock(path: Path) -> int | None:
    """A descriptor of a locked file, made if there is none; None if another process has it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.close(descriptor)  # of a run that has just ended and removed it


def holds_preparation(output: Path, fingerprint: str, *, overwrite: bool) -> bool:
    """Whether `output` already holds the preparation with this fingerprint, with all files.

    Raises:
        InputError: `output` holds it, but damaged, and must not be overwritten.
    """
    manifest = _manifest_or_none(output)
    if manifest is None or manifest.fingerprint != fingerprint:
        return False
    damaged = _damaged_files(output, manifest.files)
    if damaged and not overwrite:
        raise InputError(
            f"{output} is damaged: {', '.join(damaged)} missing or cut; give --overwrite"
        )
    return not damaged


def _damaged_files(folder: Path, sizes: Mapping[str, int]) -> list[str]:
    return [
        name
        for name, size in sizes.items()
        if not (folder / name).is_file() or (folder / name).stat().st_size != size
    ]


def check_replaceable(output: Path, overwrite: bool) -> None:
    """Check that a preparation may be written to `output`: it is absent, empty or replaceable.

    Raises:
        InputError: it is not a folder, holds a preparation that must not be overwritten, or holds
            other files.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise InputError(f"output {output} is not a folder")
    present = {each.name for each in output.iterdir()}
    if not present:
        return
    manifest = _manifest_or_none(output)
    strangers = present - {MANIFEST_FILE} - set(manifest.files if manifest else ())
    if strangers:
        raise InputError(
            f"output {output} holds {', '.join(sorted(strangers)[:3])}, which no preparation "
            "made; give another folder"
        )
    if not overwrite:
        raise InputError(
            f"output {output} already holds another preparation; give --overwrite to replace it"
        )


def _manifest_or_none(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except DataError:
        return None
