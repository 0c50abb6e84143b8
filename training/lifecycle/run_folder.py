"""The run folder, and the files in it that control and describe a run. Only one run at a time uses
a run folder.

lock     locked by the run using the folder; contains its host and process id
STOP     created by a user or script to stop the run; the run then saves and removes the file
DONE     created after the run's last step
started  id of the command that started the run
heartbeat.json   step, time and process id of the run, updated every few seconds
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
from parallel.error_text import os_error_text
from training.errors import InputError

LOCK: Final = "lock"
STOP: Final = "STOP"
DONE: Final = "DONE"
STARTED: Final = "started"
HEARTBEAT: Final = "heartbeat.json"
NO_ID: Final = "none"
"""torchrun's default run id."""


class FolderError(InputError):
    """Raised when a run folder cannot be used."""


@contextlib.contextmanager
def locked(run_dir: str | Path) -> Iterator[None]:
    """Context manager that locks `run_dir`, creating it if it does not exist.

    The operating system releases the lock when the process exits for any reason. Raises FolderError
    if the folder is locked by another run, is not writable, or contains links.
    """
    folder = Path(run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise FolderError(
                    f"run.dir {folder} must contain only files and folders, but {path.name} is a "
                    "link or a device"
                )
        file = (folder / LOCK).open("a+", encoding="utf-8", errors="replace")
    except OSError as error:
        raise _unwritable(folder, error) from None
    with file:
        if os.fstat(file.fileno()).st_nlink > 1:
            raise FolderError(f"run.dir {folder}: {LOCK} must not be a hard link: remove this file")
        if not _take(file):
            file.seek(0)
            raise FolderError(
                f"run.dir {folder} is in use by another run: {file.read().strip() or 'unknown'}"
            )
        file.truncate(0)
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "began": began(os.getpid())}
        try:
            os.write(file.fileno(), f"{json.dumps(holder)}\n".encode())  # nothing is left to flush
        except OSError as error:  # the disk is full
            raise _unwritable(folder, error) from None
        yield


def _unwritable(folder: Path, error: OSError) -> FolderError:
    reason = os_error_text(error, folder / LOCK)
    return FolderError(f"run.dir {folder} cannot be written to: {reason}")


def began(pid: int) -> str | None:
    """Return the start time of a process on this host, as boot id and clock ticks.

    Returns None if there is no such process, or if the system is not Linux.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        status = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
        return f"{boot} {status.rpartition(')')[2].split()[19]}"
    except (OSError, LookupError):
        return None


class HeldFolder:
    """A locked run folder, kept open so that its inode number is not reused."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir)
        self._lock = self._lock_number()
        self._folder = os.open(self.path, os.O_RDONLY)

    def close(self) -> None:
        """Close the folder."""
        os.close(self._folder)

    def check(self) -> None:
        """Raise FolderError if the folder was moved or removed. Also raise FolderError if this
        run's lock file was removed and another run has created a new lock file."""
        try:
            there = os.path.samestat(os.stat(self.path), os.fstat(self._folder))
        except (FileNotFoundError, NotADirectoryError):
            there = False
        except OSError:  # continue if the disk is unavailable
            there = True
        if not there:
            raise FolderError(
                f"run.dir {self.path} was moved or removed while the run was using it, so the run "
                "can no longer save checkpoints"
            )
        with contextlib.suppress(OSError):
            if self._lock_number() not in (None, self._lock):
                raise FolderError(
                    f"run.dir {self.path} is in use by another run, because the lock file {LOCK} "
                    "was removed"
                )

    def _lock_number(self) -> int | None:
        """Return the lock file's inode number, or None if the file is missing. The lock file must
        not be opened: closing it would release the lock."""
        try:
            return os.stat(self.path / LOCK).st_ino
        except FileNotFoundError:
            return None


def in_use(run_dir: str | Path) -> bool:
    """Return whether another process has locked `run_dir`."""
    file = Path(run_dir) / LOCK
    if not file.exists():
        return False
    with file.open("a+", encoding="utf-8") as opened:
        return not _take(opened)


def _take(file: TextIO) -> bool:
    """Lock a file until it is closed. Return False if it is locked by another process.

    Raises FolderError if the file system does not support locks.
    """
    try:
        # A lockf lock belongs to this process only, while child processes would inherit a flock
        # lock.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise FolderError(f"{file.name} cannot be locked: {error.strerror}") from None
        return False
    return True


def mark_started(run_dir: str | Path) -> None:
    """Remove the files STOP and DONE from an earlier start, and write the id of this command.

    A STOP file newer than the lock is kept, because it is meant for the current start.
    """
    stop, lock = Path(run_dir) / STOP, Path(run_dir) / LOCK
    if stop.exists() and stop.stat().st_mtime < lock.stat().st_mtime:
        stop.unlink()
        print(f"removed {stop}, which was created before this start", flush=True)
    mark_done(run_dir, False)
    replace_file(Path(run_dir) / STARTED, _command())


def starts_again(run_dir: str | Path) -> bool:
    """Return whether this command has started in `run_dir` before and was restarted by torchrun or
    SLURM.

    A restarted command must not apply `--resume none` or `--resume STEP` again. torchrun counts
    restarts per node, so the result may differ across ranks.
    """
    counts = (os.environ.get(f"{who}_RESTART_COUNT", "0") for who in ("TORCHELASTIC", "SLURM"))
    file = Path(run_dir) / STARTED
    return any(count != "0" for count in counts) and (
        file.exists() and file.read_text(encoding="utf-8", errors="replace") == _command() != ""
    )


def _command() -> str:
    """Return the id of this command: the SLURM job id if there is one, else torchrun's run id, else
    torchrun's process id. Return "" if there is none of these."""
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
