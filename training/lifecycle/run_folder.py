"""The run folder, which one run uses at a time, and the files that control and describe the run.

lock     locked by the run that uses the folder; contains its host and process id
STOP     created by a person or a script: the run saves, removes the file and ends
DONE     the run has taken its last step
started  id of the command that started here
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
"""Id that torchrun gives to a command without an id."""


class FolderError(InputError):
    """A run folder that cannot be used."""


@contextlib.contextmanager
def locked(run_dir: str | Path) -> Iterator[None]:
    """Lock `run_dir` within a context; create it if it does not exist.

    The operating system releases the lock when the process ends in any way. Raises FolderError if
    another run holds the lock, nothing can be written, or links would redirect the run's files.
    """
    folder = Path(run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise FolderError(
                    f"run.dir {folder} must have plain files, but {path.name} is a link or a device"
                )
        file = (folder / LOCK).open("a+", encoding="utf-8", errors="replace")
    except OSError as error:
        raise FolderError(
            f"run.dir {folder} cannot be written to: {error.strerror} ({error.filename})"
        ) from None
    with file:
        if os.fstat(file.fileno()).st_nlink > 1:
            raise FolderError(
                f"run.dir {folder}: {LOCK} must be a file with one name, got a hard link: remove it"
            )
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
    """Return when a process of this host started, as boot id and ticks.

    Returns None if there is no such process, and on systems other than Linux.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        status = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
        return f"{boot} {status.rpartition(')')[2].split()[19]}"
    except (OSError, LookupError):
        return None


class HeldFolder:
    """A locked run folder, kept open so that no new folder gets its inode number."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir)
        self._lock = self._lock_number()
        self._folder = os.open(self.path, os.O_RDONLY)

    def close(self) -> None:
        """Close the folder."""
        os.close(self._folder)

    def check(self) -> None:
        """Raise FolderError if the folder was moved, or if this run's lock was removed by hand and
        another run has created a lock since."""
        if not self._is_there():
            raise FolderError(
                f"run.dir {self.path} was moved or removed while the run used it: nothing more is "
                "saved there"
            )
        with contextlib.suppress(OSError):  # a disk that does not respond is no reason to stop
            if self._lock_number() not in (None, self._lock):
                raise FolderError(
                    f"run.dir {self.path} has been in use by another run since its lock was removed"
                )

    def _is_there(self) -> bool:
        """Return whether the folder is still at its path; True if the disk does not respond."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._folder))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def _lock_number(self) -> int | None:
        """Return the inode of the lock file, or None if there is none. The file is not opened, as
        closing it would release the lock."""
        try:
            return os.stat(self.path / LOCK).st_ino
        except FileNotFoundError:
            return None


def in_use(run_dir: str | Path) -> bool:
    """Return whether another process holds the lock of `run_dir` now."""
    file = Path(run_dir) / LOCK
    if not file.exists():
        return False
    with file.open("a+", encoding="utf-8") as opened:
        return not _take(opened)


def _take(file: TextIO) -> bool:
    """Lock a file until it is closed; return False if another process holds the lock.

    Raises FolderError if the file cannot be locked at all.
    """
    try:
        # This lock belongs to the process; child processes would inherit a lock of the open file.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise FolderError(f"{file.name} cannot be locked: {error.strerror}") from None
        return False
    return True


def mark_started(run_dir: str | Path) -> None:
    """Remove the files STOP and DONE of an earlier start, and write the id of this command.

    A STOP file that is newer than the lock is kept, as it is meant for the present start.
    """
    stop, lock = Path(run_dir) / STOP, Path(run_dir) / LOCK
    if stop.exists() and stop.stat().st_mtime < lock.stat().st_mtime:
        stop.unlink()
    mark_done(run_dir, False)
    replace_file(Path(run_dir) / STARTED, _command())


def starts_again(run_dir: str | Path) -> bool:
    """Return whether torchrun or SLURM restarts a command that already started in `run_dir`.

    A restarted command must not apply `--resume none` or `--resume STEP` again. torchrun counts
    restarts per node, so ranks may get different answers.
    """
    counts = (os.environ.get(f"{who}_RESTART_COUNT", "0") for who in ("TORCHELASTIC", "SLURM"))
    file = Path(run_dir) / STARTED
    return any(count != "0" for count in counts) and (
        file.exists() and file.read_text(encoding="utf-8", errors="replace") == _command() != ""
    )


def _command() -> str:
    """Return the id of this command: the SLURM job's id, else torchrun's run id, else the process
    id of torchrun; "" if there is no launcher."""
    command = os.environ.get("TORCHELASTIC_RUN_ID", "")
    command = f"process {os.getppid()} of {socket.gethostname()}" if command == NO_ID else command
    return os.environ.get("SLURM_JOB_ID", command)


def mark_done(run_dir: str | Path, done: bool) -> None:
    """Create or remove the file DONE."""
    path = Path(run_dir) / DONE
    if done:
        replace_file(path, "")
    else:
        path.unlink(missing_ok=True)
