"""A folder that appears complete or not at all, and whose making may continue after a kill."""

import fcntl
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallel.disk import delete, sync
from scripts.data.sources import LOCK
from training.config.data import local_path
from training.data.manifest import MANIFEST_FILE, Manifest, read_manifest
from training.errors import DataError, InputError
from training.json_file import read_json

PROGRESS = "progress.json"


class AtomicFolder:
    """Builds `output` in the folder `output.preparing`, and renames it when all is on disk.

    As a context manager: write to `path`; `commit` makes it `output`, and without a commit nothing
    is left. A killed run leaves `output.preparing`, which the next run removes; it holds the lock
    of `output.preparing.lock` until it has cleaned up, so that no two are at work. Without that
    file, folders of these names are somebody else's.

    After `save` an end without a commit keeps what was written. A run with the same key then finds
    in `progress` what was saved, and in `state` the files that it kept for itself.

    Args:
        output: the folder.
        check: raises InputError unless `output` may be written to; called once no other run is at
            work, and again before `output` is replaced.
        key: of all that determines the content; None if an interrupted run cannot continue.

    Raises:
        InputError: `output` is a URL or needs to be expanded; another run is preparing the same
            folder, or has made one meanwhile; or a folder of somebody else is in the way.
    """

    def __init__(self, output: Path, check: Callable[[], None], key: str | None = None) -> None:
        _, wrong, rule = local_path("output", str(output))
        if wrong:
            raise InputError(f"the output {rule}, got {output}")
        self.output = output
        self._check = check
        self._key = key
        self.progress: Any = None
        self.state = output.with_name(output.name + ".preparing.state")
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
        places = (self.path, self.state, self._replaced)
        leftovers = [path for path in places if os.path.lexists(path)]
        if leftovers and not was_killed:
            raise InputError(f"{leftovers[0]} is in the way, and is not left from a preparation")
        # Left by a run that was killed between the renames of `commit`.
        if self._replaced.exists() and not self.output.exists():
            self._replaced.rename(self.output)
        self.progress = self._saved()
        if self.kept and self.progress is None:
            print(
                f"warning: {self.path} is of another preparation, or its inputs have changed: "
                "begins again",
                file=sys.stderr,
            )
        for leftover in places if self.progress is None else (self._replaced,):
            if os.path.lexists(leftover):
                delete(leftover)
        self._check()
        self.path.mkdir(exist_ok=True)
        if self._key is not None:
            self.state.mkdir(exist_ok=True)

    def save(self, progress: Any) -> None:
        """Keep, from now on, what is written; `progress` goes into JSON. The files that it counts
        must be on the disk."""
        new = self.state / (PROGRESS + ".new")
        new.write_text(json.dumps({"key": self._key, "progress": progress}), encoding="utf-8")
        sync(new)
        os.replace(new, self.state / PROGRESS)
        sync(self.state)

    def _saved(self) -> Any:
        """Return what a run with the same key saved, None if there is nothing to continue from."""
        if self._key is None or not self.path.is_dir():
            return None
        try:
            saved = read_json(self.state / PROGRESS)
        except (OSError, ValueError):
            return None
        return saved["progress"] if saved["key"] == self._key else None

    @property
    def kept(self) -> bool:
        """Whether there is something to continue from."""
        return self.path.exists() and (self.state / PROGRESS).exists()

    def _release(self) -> None:
        assert self._locked is not None
        if not self.kept:
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
        for left in (self._replaced, self.state):
            if left.exists():
                delete(left)

    def __exit__(self, *_: object) -> None:
        if not self.kept:
            for left in (self.path, self.state):
                if left.exists():
                    delete(left)
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
    """Return whether `output` already holds the preparation with this fingerprint, with all files.

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
    if not os.path.lexists(output):
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
