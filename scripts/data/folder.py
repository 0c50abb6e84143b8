"""A folder that appears complete or not at all."""

import fcntl
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from training.data.manifest import MANIFEST_FILE, Manifest, read_manifest
from training.errors import DataError, InputError


class AtomicFolder:
    """Builds `output` in the folder `output.preparing`, and renames it when all is on disk.

    As a context manager: write to `path`; `commit` makes it `output`, and without a commit nothing
    is left. A killed run leaves `output.preparing`, which the next run removes; a lock tells it
    from the folder of a run in progress.

    Raises:
        InputError: another run is preparing the same folder.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.path = output.with_name(output.name + ".preparing")

    def __enter__(self) -> "AtomicFolder":
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise InputError(f"another run is preparing {self.output}") from None
        for leftover in self.path.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        return self

    def commit(self) -> None:
        """Replace `output` by what was written."""
        for file in self.path.iterdir():
            _sync(file)
        _sync(self.path)
        previous = self.output.with_name(self.output.name + ".replaced")
        if previous.exists():  # left by a run killed between the renames below
            shutil.rmtree(previous)
        if self.output.exists():
            self.output.rename(previous)
        self.path.rename(self.output)
        _sync(self.output.parent)
        if previous.exists():
            shutil.rmtree(previous)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.path.exists():
            shutil.rmtree(self.path)
        os.close(self._lock)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


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
