"""An output folder that appears only when it is complete. A killed preparation can be resumed."""

import fcntl
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallel.disk import delete, replace_file, sync
from scripts.command import warn
from scripts.data.sources import LOCK
from training.data.manifest import MANIFEST_FILE, Manifest, read_manifest
from training.errors import DataError, InputError
from training.json_file import read_json
from training.local_path import local_path

PROGRESS = "progress.json"


class AtomicFolder:
    """Context manager that writes a folder atomically by building it as `output.preparing`.

    Within the context, write to `path`. `commit` syncs `path` and renames it to `output`. Without a
    commit, everything is deleted. If the process is killed, `output.preparing` stays until the next
    run removes it. Runs hold a lock on `output.preparing.lock` until they have cleaned up, so two
    runs never write the same folder. An `output.preparing` without a lock file was written by some
    other program and is left alone.

    After `save`, the files written so far are kept even without a commit. The next run with the
    same key finds the saved value in `progress` and the saved state files in the folder `state`.

    Args:
        output: the folder to write.
        check: raises InputError if `output` must not be written; called after locking and again
            before `output` is replaced.
        key: identifies everything that determines the content; None disables resuming.

    Raises:
        InputError: `output` is a URL or contains ~ or a variable; another run is writing the same
            folder or has just finished it; or `output.preparing` was written by another program.
    """

    def __init__(self, output: Path, check: Callable[[], None], key: str | None = None) -> None:
        _, wrong, rule = local_path("output", str(output))
        if wrong:
            raise InputError(f"the output {rule}")
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
            raise InputError(f"another process is writing to {self.output}")
        try:
            self._begin(was_killed)
        except BaseException:
            self._release()
            raise
        return self

    def _begin(self, was_killed: bool) -> None:
        """Remove leftovers of a killed run, check `output`, and create the folder to write to."""
        paths = (self.path, self.state, self._replaced)
        leftovers = [path for path in paths if os.path.lexists(path)]
        if leftovers and not was_killed:
            raise InputError(
                f"{leftovers[0]} already exists but was not written by prepare_data.py; move it"
            )
        # Left behind by a run that was killed between the two renames in `commit`.
        if self._replaced.exists() and not self.output.exists():
            self._replaced.rename(self.output)
        self.progress = self._saved()
        if self.kept and self.progress is None:
            warn(f"{self.path} was made from different inputs or options; starting over")
        _remove(*(paths if self.progress is None else (self._replaced,)))
        self._check()
        self.path.mkdir(exist_ok=True)
        if self._key is not None:
            self.state.mkdir(exist_ok=True)

    def save(self, progress: Any) -> None:
        """Save `progress` as JSON. From then on, written files are kept even without a commit.

        All files that `progress` refers to must already be synced to disk.
        """
        content = json.dumps({"key": self._key, "progress": progress})
        replace_file(self.state / PROGRESS, content, synced=True)

    def _saved(self) -> Any:
        """Return the progress saved by a run with the same key, or None."""
        if self._key is None or not self.path.is_dir():
            return None
        try:
            saved = read_json(self.state / PROGRESS)
        except (OSError, ValueError):
            return None
        same = isinstance(saved, dict) and saved.get("key") == self._key
        return saved.get("progress") if same else None

    @property
    def kept(self) -> bool:
        """Whether a later run can resume from the saved progress."""
        return self.path.exists() and (self.state / PROGRESS).exists()

    def _release(self) -> None:
        assert self._locked is not None
        if not self.kept:
            self._lock.unlink()
        os.close(self._locked)

    def commit(self) -> None:
        """Replace `output` with the written files."""
        for file in self.path.iterdir():
            sync(file)
        sync(self.path)
        self._check()
        if self.output.exists():
            self.output.rename(self._replaced)
        self.path.rename(self.output)
        sync(self.output.parent)
        _remove(self._replaced, self.state)

    def __exit__(self, *_: object) -> None:
        if not self.kept:
            _remove(self.path, self.state)
        self._release()


def _remove(*paths: Path) -> None:
    """Delete the paths, ignoring missing ones."""
    for path in paths:
        if os.path.lexists(path):
            delete(path)


def clean_up(output: Path) -> None:
    """Remove leftovers of a run that was killed after it completed `output`.

    No-op while another process is writing `output`.
    """
    if output.with_name(output.name + LOCK).exists():
        with suppress(InputError), AtomicFolder(output, lambda: None):
            pass


def _lock(path: Path) -> int | None:
    """Create and lock a file. Return the file's descriptor, or None if another process holds the
    lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.close(descriptor)  # another process removed the file on exit; try again


def holds_preparation(output: Path, fingerprint: str, *, overwrite: bool) -> bool:
    """Return whether `output` already holds a complete preparation with this fingerprint.

    Raises:
        InputError: the preparation is damaged and `overwrite` is False.
    """
    manifest = _manifest_or_none(output)
    if manifest is None or manifest.fingerprint != fingerprint:
        return False
    damaged = [
        name
        for name, size in manifest.files.items()
        if not (output / name).is_file() or (output / name).stat().st_size != size
    ]
    if damaged and not overwrite:
        raise InputError(
            f"{output} is damaged (missing or truncated: {', '.join(damaged)}); pass --overwrite "
            "to recreate it"
        )
    return not damaged


def check_replaceable(output: Path, overwrite: bool) -> None:
    """Check that `output` does not exist, is empty, or is a preparation that may be replaced.

    Raises:
        InputError: `output` is not a folder, contains files not written by a preparation, or
            contains a preparation and `overwrite` is False.
    """
    if not os.path.lexists(output):
        return
    if not output.is_dir():
        raise InputError(f"output {output} must be a folder, got a file")
    present = {each.name for each in output.iterdir()}
    if not present:
        return
    manifest = _manifest_or_none(output)
    unknown = present - {MANIFEST_FILE} - set(manifest.files if manifest else ())
    if unknown:
        raise InputError(
            f"output {output} contains {', '.join(sorted(unknown)[:3])}, which was not written by "
            "prepare_data.py; choose another folder"
        )
    if not overwrite:
        raise InputError(
            f"output {output} contains data from different inputs or options; pass --overwrite to "
            "replace it"
        )


def _manifest_or_none(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except DataError:
        return None
