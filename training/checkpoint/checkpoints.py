"""Seal, find, verify and remove the checkpoints in a run folder.

    RUN/checkpoints/latest          name of the newest step folder, for people and scripts
    RUN/checkpoints/step_00000100/
        state/       all tensors, in logical coordinates (parallel/checkpoint/state.py)
        config.yaml  resolved config of the run
        rng.pt       RNG states of all ranks
        meta.json    step, data position, identity, versions, and a hash of every file
        COMPLETE     hash of meta.json, written last

A checkpoint is written to a temporary folder `.writing-...` in `checkpoints`. The folder is renamed
to step_* once all of its files are on disk, so every step_* folder was complete when it was named.
Checkpoints are self-contained: they need no file outside their folder. Loading never depends on
`latest`.
"""

import contextlib
import hashlib
import json
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final

from parallel.checkpoint.safe_index import PLAIN_FILE, UnsafeIndexError, index_files, read_index
from parallel.checkpoint.state_writer import FileFacts, file_facts
from parallel.disk import delete, free_name, replace_file, sync, sync_all
from parallel.error_text import os_error_text
from training.checkpoint import COMPLETE
from training.checkpoint.stored_checkpoint import (
    FORMAT,
    META,
    REQUIRED,
    STATE,
    STEP,
    WEIGHTS,
    AverageMeta,
    CheckpointInfo,
    Meta,
    ResumeError,
    RunMeta,
    StoredTensors,
    changed,
)
from training.config import InvalidConfigError
from training.config.binding import bind
from training.errors import Aid, BrokenCheckpointError, InputError, near_name
from training.json_file import parse_json, read_regular, real_path

FOLDER: Final = "checkpoints"
LATEST: Final = "latest"


def read_checkpoint(path: str | Path) -> CheckpointInfo:
    """Return the checkpoint in a step folder, or the newest complete checkpoint in a run folder.

    Checks that the checkpoint is complete and that all files have their recorded sizes. Call
    `problems` to verify the hashes of the files. Requires no process group.

    If `path` is a run folder, broken checkpoints that are newer than the returned checkpoint only
    cause warnings. Raises BrokenCheckpointError if `path` is the step folder of a broken
    checkpoint, and ResumeError if `path` does not exist or contains no complete checkpoint.
    """
    path = Path(path)
    if not (path / FOLDER).is_dir():
        if not STEP.fullmatch(path.name) and not (path / META).exists():
            if not path.exists():
                raise ResumeError(f"{path} does not exist{near_name(path)}")
            if (path / "config.json").is_file():
                raise ResumeError(
                    f"{path} is a Hugging Face folder: convert it to a checkpoint with "
                    "scripts/convert_hf.py import"
                )
            for run in filter(steps, path.parents[:2]):  # `path` is the folder of checkpoints
                newest = step_folder(run, steps(run)[-1])
                raise ResumeError(
                    f"{path} must be a run folder or a checkpoint, such as {run} or {newest}"
                )
            raise ResumeError(
                f"{path} contains no checkpoint; set checkpoint.interval to save checkpoints"
            )
        return _complete(path)
    broken = []
    for step in sorted(steps(path), reverse=True):
        try:
            info = _complete(step_folder(path, step))
        except BrokenCheckpointError as error:
            broken.append(str(error))
            continue
        for problem in broken:
            print(f"warning: {problem}; using {info.path.name} instead", file=sys.stderr)
        return info
    raise ResumeError("; ".join([f"{path} contains no complete checkpoint", *broken]))


def steps(run_dir: str | Path) -> list[int]:
    """Return the steps of all checkpoints in a run folder, including broken ones, in ascending
    order."""
    folder = Path(run_dir) / FOLDER
    names = [STEP.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    matches = [(int(match[1]), match[0]) for match in names if match]
    return sorted(step for step, name in matches if name == step_folder(run_dir, step).name)


def step_folder(run_dir: str | Path, step: int) -> Path:
    """Return the checkpoint folder for `step`."""
    return Path(run_dir) / FOLDER / f"step_{step:08d}"


def _complete(path: Path) -> CheckpointInfo:
    """Return the checkpoint in a step folder.

    Raises BrokenCheckpointError if the checkpoint is incomplete, and ResumeError if its format
    version is not `FORMAT`.
    """
    try:
        content = read_regular(path / META)
        marker = read_regular(path / COMPLETE).decode().strip()
        if marker != hashlib.sha256(content).hexdigest():
            raise BrokenCheckpointError(changed(path, META))
        meta = parse_json(content)
        version = meta.get("format") if isinstance(meta, dict) else None
        if version != FORMAT:
            raise ResumeError(f"{path}: format must be {FORMAT}, got {version!r}")
        weights_only = meta.get("weights_only") is True
        bind((AverageMeta if "averaged" in meta else Meta) if weights_only else RunMeta, meta)
        check_name(path, meta["step"])
        info = CheckpointInfo(path, meta, marker)
        files = info.files
        for name in files:
            if not real_path(path / name).is_relative_to(real_path(path)):
                raise BrokenCheckpointError(
                    f"{path}: {META} lists {name!r}, a path outside the folder"
                )
        for name in WEIGHTS if weights_only else REQUIRED:
            if name not in files:
                raise BrokenCheckpointError(f"{path}: {META} does not list {name}")
        for name, facts in files.items():
            status = (path / name).stat()
            if not S_ISREG(status.st_mode):
                raise BrokenCheckpointError(f"{path}: {name} must be a regular file")
            if status.st_size != facts.bytes:
                raise BrokenCheckpointError(
                    f"{path}: {name} must have {facts.bytes} bytes, got {status.st_size}"
                )
    except OSError as error:
        raise BrokenCheckpointError(os_error_text(error, path)) from None
    except InvalidConfigError as error:
        raise BrokenCheckpointError(f"{path}: {META}: {error.problems[0]}") from None
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        raise BrokenCheckpointError(f"{path}: {META} cannot be read: {error!r:.200}") from None
    return info


def check_name(path: Path, step: int) -> None:
    """Raise BrokenCheckpointError if the name of the folder contains a step other than `step`."""
    named = STEP.fullmatch(path.name)
    if named is not None and int(named[1]) != step:
        raise BrokenCheckpointError(
            f"{path}: the folder's name must contain {step}, the step in {META}"
        )


def problems(info: CheckpointInfo, share: slice = slice(None)) -> Iterator[str]:
    """Yield a message for each file that has changed since it was written.

    `share` is the slice of files to check. If the slice includes the first file, the tensor index
    is checked as well: the index must be safe to read, and may only refer to files with a recorded
    hash.
    """
    if not share.start:
        try:
            named = set(index_files(read_index(info.state)))
        except UnsafeIndexError as error:
            yield str(error)
            named = set()
        for name in sorted(named):
            if f"{STATE}/{name}" not in info.files:
                rule = f"the tensor index refers to {name}, which is not listed in {META}"
                yield f"{info.path}: {rule}"
    for name, facts in sorted(info.files.items())[share]:
        try:
            same = file_facts(info.path / name) == facts
        except OSError as error:
            yield os_error_text(error, info.path / name)
            continue
        if not same:
            yield changed(info.path, name)


def not_finite(info: CheckpointInfo, share: slice = slice(None)) -> Iterator[str]:
    """Yield a message for each tensor with non-finite values. `share` is the slice of tensors to
    check.

    Call `problems` first. Raises BrokenCheckpointError if the tensors cannot be read.
    """
    stored = StoredTensors(info.state)
    for keys in stored.batches(stored.keys()[share]):
        for key, value in stored.read(keys).items():
            if not bool(value.isfinite().all()):
                yield f"{info.path}: {key} is not finite"


def new_folder(run_dir: str | Path, step: int) -> Path:
    """Create and return a folder for the checkpoint at `step`, with an empty subfolder `state`.

    The run folder must exist.
    """
    folder = Path(run_dir) / FOLDER / f".writing-{step}-{secrets.token_hex(4)}"
    folder.parent.mkdir(exist_ok=True)
    folder.mkdir()
    (folder / STATE).mkdir()
    return folder


def check_place(run_dir: str | Path) -> None:
    """Raise InputError if creating a temporary file in the run's folder `checkpoints` fails
    twice."""
    folder = Path(run_dir) / FOLDER
    for last in (False, True):
        try:
            folder.mkdir(exist_ok=True)
            return tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            if last:
                text = f"cannot write to run.dir {run_dir}: {os_error_text(error, run_dir)}"
                raise InputError(text) from None


def complete(
    folder: Path, run_dir: str | Path, meta: Mapping[str, Any], state: Mapping[str, FileFacts]
) -> Path:
    """Seal the checkpoint in `folder`, rename the folder to step_*, and return its new path.

    `meta` and `state` are passed to `seal`. All files are synced to disk before the rename, and the
    rename is synced before the function returns. Call `name_latest` next.
    """
    seal(folder, meta, state)
    target = step_folder(run_dir, meta["step"])
    if target.exists():
        quarantine(target)
    folder.rename(target)
    try:
        sync(target.parent)
    except OSError:
        target.rename(folder)  # a crash could lose the new name
        raise
    return target


def seal(folder: Path, meta: Mapping[str, Any], state: Mapping[str, FileFacts]) -> None:
    """Write meta.json and COMPLETE, the last files of a checkpoint, and sync all files to disk.

    `state` maps each file in the folder `state` to its size and hash. The tensors in these files
    must already be on disk.
    """
    files = {f"{STATE}/{name}": facts for name, facts in state.items()}
    files |= {path.name: file_facts(path) for path in _files(folder)}
    content = {**meta, "format": FORMAT, "files": {n: asdict(f) for n, f in files.items()}}
    text = json.dumps(content, indent=1) + "\n"
    (folder / META).write_text(text, encoding="utf-8")
    (folder / COMPLETE).write_bytes(hashlib.sha256(text.encode()).hexdigest().encode() + b"\n")
    sync_all([*_files(folder), folder / STATE / PLAIN_FILE])
    sync_all([folder / STATE, folder])


def _files(folder: Path) -> list[Path]:
    """Return the files in a folder, excluding subfolders."""
    return sorted(path for path in folder.iterdir() if path.is_file())


def name_latest(run_dir: str | Path, name: str) -> None:
    """Atomically write the name of a step folder to `latest` and sync it to disk."""
    replace_file(Path(run_dir) / FOLDER / LATEST, name + "\n", synced=True)


def latest_name(run_dir: str | Path) -> str | None:
    """Return the contents of `latest`, or None if there is no such file."""
    path = Path(run_dir) / FOLDER / LATEST
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else None


def remove(folder: Path) -> None:
    """Remove a checkpoint. The folder is renamed before any file is removed, so that a partially
    removed checkpoint is never loaded."""
    doomed = folder.with_name(f".removing-{folder.name}-{secrets.token_hex(4)}")
    folder.rename(doomed)
    delete(doomed)


def quarantine(folder: Path) -> Path:
    """Rename a broken checkpoint to `broken-...` and return its new path."""
    aside = free_name(folder.with_name(f"broken-{folder.name}"))
    folder.rename(aside)
    return aside


def superseded(steps: Sequence[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    """Return the steps of the checkpoints that `retire` removes. `steps` contains the steps of all
    complete checkpoints, in ascending order."""
    older = [] if keep_last is None else steps[:-keep_last]
    return [step for step in older if keep_every is None or step % keep_every]


def retire(run_dir: str | Path, *, keep_last: int | None, keep_every: int | None) -> list[int]:
    """Remove old checkpoints and return their steps.

    Keeps the `keep_last` newest complete checkpoints (None keeps all). If `keep_every` is given,
    also keeps complete checkpoints whose step is a multiple of `keep_every`. Never removes broken
    checkpoints. Leftovers of an interrupted call are removed first. If a folder cannot be removed,
    all other folders are still removed before the OSError is raised.
    """
    leftovers = [*(Path(run_dir) / FOLDER).glob(".removing-*")]
    whole: list[int] = []
    for step in [] if keep_last is None else steps(run_dir):
        with contextlib.suppress(InputError):  # the checkpoint is broken
            whole.append(_complete(step_folder(run_dir, step)).step)
    doomed = superseded(whole, keep_last, keep_every)
    with contextlib.ExitStack() as removals:  # runs every callback, the last one first
        for step in reversed(doomed):
            removals.callback(remove, step_folder(run_dir, step))
        for leftover in leftovers:
            removals.callback(delete, leftover)
    return doomed


def sweep(run_dir: str | Path) -> list[str]:
    """Remove unfinished and partially removed checkpoints and return their names.

    A checkpoint that cannot be removed only causes a warning. No other process may be using the run
    folder.
    """
    folder, removed = Path(run_dir) / FOLDER, []
    for path in sorted([*folder.glob(".writing-*"), *folder.glob(".removing-*")]):
        with Aid(f"{path} is not removed"):
            delete(path)
            removed.append(path.name)
    return removed


def set_aside_after(run_dir: str | Path, step: int) -> Path | None:
    """Move all checkpoints after `step` to a new folder. Return this folder, or None if there are
    no such checkpoints.

    A run that was rewound to `step` must never resume from a later checkpoint, even after a crash.
    """
    later = [each for each in steps(run_dir) if each > step]
    if not later:
        return None
    aside = free_name(Path(run_dir) / f"{FOLDER}-left-at-{step:08d}")
    aside.mkdir()
    for each in later:
        source = step_folder(run_dir, each)
        source.rename(aside / source.name)
    for folder in (aside, aside.parent, Path(run_dir) / FOLDER):
        sync(folder)
    return aside
