"""An output folder that appears only when it is complete; a killed run can continue its work."""

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
    """Builds `output` in the folder `output.preparing`, and renames it when everything is on disk.

    Inside the context manager, write to `path`. `commit` turns `path` into `output`; without a
    commit everything is deleted. A killed run leaves `output.preparing`, which the next run
    removes. A run locks `output.preparing.lock` until it has cleaned up, so two runs never work at
    once. If there is no lock file, a folder with such a name comes from another program and is not
    touched.

    After `save`, the written files are kept even without a commit. The next run with the same key
    finds the saved value in `progress`, and the kept files of the preparation's state in the folder
    `state`.

    Args:
        output: the folder.
        check: raises InputError unless `output` may be written to. `check` is called when the lock
            is taken, and again before `output` is replaced.
        key: identifies everything that determines the content; None if no later run may continue.

    Raises:
        InputError: `output` is a URL or contains ~ or a variable; another run is preparing the same
            folder or has just finished it; or a folder of another program is in the way.
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
        """Remove a killed run's leftovers, check `output`, and create the folder to write to."""
        places = (self.path, self.state, self._replaced)
        leftovers = [path for path in places if os.path.lexists(path)]
        if leftovers and not was_killed:
            raise InputError(
                f"{leftovers[0]} is in the way and was not left by a preparation: move it"
            )
        # A run that was killed between the renames of `commit` left this folder.
        if self._replaced.exists() and not self.output.exists():
            self._replaced.rename(self.output)
        self.progress = self._saved()
        if self.kept and self.progress is None:
            print(
                f"warning: {self.path} belongs to another preparation, or its inputs have changed; "
                "starting again",
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
        """Save `progress` as JSON, and keep the written files from now on.

        The files that `progress` counts must be on disk.
        """
        new = self.state / (PROGRESS + ".new")
        new.write_text(json.dumps({"key": self._key, "progress": progress}), encoding="utf-8")
        sync(new)
        os.replace(new, self.state / PROGRESS)
        sync(self.state)

    def _saved(self) -> Any:
        """Return the progress that a run with the same key saved, or None if there is none."""
        if self._key is None or not self.path.is_dir():
            return None
        try:
            saved = read_json(self.state / PROGRESS)
        except (OSError, ValueError):
            return None
        return saved["progress"] if saved["key"] == self._key else None

    @property
    def kept(self) -> bool:
        """Whether a run can continue from saved progress."""
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
    """Remove what a run killed after completing `output` left, unless another run is at work."""
    if output.with_name(output.name + LOCK).exists():
        with suppress(InputError), AtomicFolder(output, lambda: None):
            pass


def _lock(path: Path) -> int | None:
    """Lock a file, which is created if missing; return its descriptor, or None if another process
    holds the lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.close(descriptor)  # a run that has just ended removed the file


def holds_preparation(output: Path, fingerprint: str, *, overwrite: bool) -> bool:
    """Return whether `output` already contains the complete preparation with this fingerprint.

    Raises:
        InputError: the preparation is damaged, and `output` must not be overwritten.
    """
    manifest = _manifest_or_none(output)
    if manifest is None or manifest.fingerprint != fingerprint:
        return False
    damaged = _damaged_files(output, manifest.files)
    if damaged and not overwrite:
        raise InputError(
            f"{output} is damaged: {', '.join(damaged)} missing or truncated; give --overwrite"
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
        InputError: `output` is not a folder, contains files that no preparation made, or contains a
            preparation that must not be overwritten.
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
            f"output {output} contains {', '.join(sorted(strangers)[:3])}, which no preparation "
            "wrote; give another folder"
        )
    if not overwrite:
        raise InputError(
            f"output {output} already contains another preparation; give --overwrite to replace it"
        )


def _manifest_or_none(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except DataError:
        return None
