"""The run folder, which one run at a time uses, and the files that control and describe it.

lock     held by the run that uses the folder, with its host and process id
STOP     made by a person or a script: the run saves, removes the file and ends
DONE     the run has taken its last step
started  the id of the torchrun command that has begun here
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

from parallel.disk import replace_file
from training.errors import InputError

LOCK: Final = "lock"
STOP: Final = "STOP"
DONE: Final = "DONE"
STARTED: Final = "started"
NO_ID: Final = "none"
"""What torchrun calls a command that was given no id."""


class FolderError(InputError):
    """A run folder that cannot be used."""


@contextlib.contextmanager
def locked(run_dir: str | Path) -> Iterator[None]:
    """Context in which no other run uses `run_dir`, which is made if it does not exist.

    The operating system holds the lock and releases it however the process ends. Raises
    FolderError if another run holds the lock, nothing can be written, or what a run would write
    there would end up elsewhere.
    """
    folder = Path(run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise FolderError(
                    f"run.dir {folder} must have plain files, {path.name} is a link or a device"
                )
        file = (folder / LOCK).open("a+", encoding="utf-8", errors="replace")
    except OSError as error:
        raise FolderError(
            f"run.dir {folder} cannot be written to: {error.strerror} ({error.filename})"
        ) from None
    with file:
        if os.fstat(file.fileno()).st_nlink > 1:
            raise FolderError(f"run.dir {folder}: {LOCK} must have no other name: remove this one")
        if not _take(file):
            file.seek(0)
            raise FolderError(
                f"run.dir {folder} is in use by another run: {file.read().strip() or 'unknown'}"
            )
        file.truncate(0)
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "began": began(os.getpid())}
        file.write(json.dumps(holder) + "\n")
        file.flush()
        yield


def began(pid: int) -> str | None:
    """Return when a process of this host began, by the boot and in its ticks; None without one, and
    on other systems than Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        status = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
        return f"{boot} {status.rpartition(')')[2].split()[19]}"
    except (OSError, LookupError):
        return None


class HeldFolder:
    """The folder of a run that has locked it, kept open so that no new one takes its number."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir)
        self._lock = self._lock_number()
        self._folder = os.open(self.path, os.O_RDONLY)

    def close(self) -> None:
        """Close the folder."""
        os.close(self._folder)

    def check(self) -> None:
        """Raise FolderError if the folder is no longer where it was, or if another run has made a
        lock of its own since that of this one was removed by hand."""
        if not self._is_there():
            raise FolderError(
                f"run.dir {self.path} was moved or removed while the run used it: nothing more is "
                "saved there"
            )
        with contextlib.suppress(OSError):  # a disk that does not answer says nothing
            if self._lock_number() not in (None, self._lock):
                raise FolderError(
                    f"run.dir {self.path} is in use by another run since its lock was removed"
                )

    def _is_there(self) -> bool:
        """Whether the folder is where it was; True if the disk does not answer."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._folder))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def _lock_number(self) -> int | None:
        """The number of the file that is the lock, None if there is none. The file is not opened:
        closing it again would release the lock."""
        try:
            return os.stat(self.path / LOCK).st_ino
        except FileNotFoundError:
            return None


def in_use(run_dir: str | Path) -> bool:
    """Return whether a run of another process holds the lock of `run_dir` now."""
    file = Path(run_dir) / LOCK
    if not file.exists():
        return False
    with file.open("a+", encoding="utf-8") as opened:
        return not _take(opened)


def _take(file: TextIO) -> bool:
    """Lock a file until it is closed; False if another process has locked it.

    Raises FolderError if it cannot be locked at all.
    """
    try:
        # A lock of the process, not of the open file, which writers and workers would inherit.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise FolderError(f"{file.name} cannot be locked: {error.strerror}") from None
        return False
    return True


def mark_started(run_dir: str | Path) -> None:
    """Remove the files that asked an earlier start to stop or say that it was done, and leave the
    id of this command.

    A STOP file that is younger than the lock asks the present one.
    """
    stop, lock = Path(run_dir) / STOP, Path(run_dir) / LOCK
    if stop.exists() and stop.stat().st_mtime < lock.stat().st_mtime:
        stop.unlink()
    mark_done(run_dir, False)
    replace_file(Path(run_dir) / STARTED, _command())


def starts_again(run_dir: str | Path) -> bool:
    """Return whether torchrun or SLURM starts a command again that has begun in `run_dir`.

    Then `--resume none` and `--resume STEP` have been carried out, and must not be again. torchrun
    counts its restarts on each node by itself, so ranks may see different answers.
    """
    counts = (os.environ.get(f"{who}_RESTART_COUNT", "0") for who in ("TORCHELASTIC", "SLURM"))
    file = Path(run_dir) / STARTED
    return any(count != "0" for count in counts) and (
        file.exists() and file.read_text(encoding="utf-8", errors="replace") == _command() != ""
    )


def _command() -> str:
    """The id of the SLURM job, or else the one that torchrun has for its command or, if it was
    given none, its process; empty without any."""
    command = os.environ.get("TORCHELASTIC_RUN_ID", "")
    command = f"process {os.getppid()} of {socket.gethostname()}" if command == NO_ID else command
    return os.environ.get("SLURM_JOB_ID", command)


def mark_done(run_dir: str | Path, done: bool) -> None:
    """Make the file DONE, or remove it."""
    path = Path(run_dir) / DONE
    if done:
        replace_file(path, "")
    else:
        path.unlink(missing_ok=True)
